"""Documented fields that are not offered here: which values ask for nothing and are accepted, and
what to do instead of the others."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from surefoot.errors import SurefootError

# Fields of OpenAI's API that change nothing here, whatever their value; docs/server.md lists them.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
_TEXT_ONLY = "drop it: this model reads and writes text only"
# Fields of OpenAI's and vLLM's APIs whose feature is not offered: the values that ask for nothing,
# and what would work instead of others.
NEUTRAL: Neutral = {
    "best_of": ((None, 1), "use n, or /v1/completions, which has it"),
    "echo": ((None, False), "use /v1/completions, which has it"),
    "suffix": (
        (None, ""),
        "write both parts into the prompt, as the model was trained to see them",
    ),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "none"), "use tool_choice"),
    "modalities": ((None, ["text"]), _TEXT_ONLY),
    "audio": ((None,), _TEXT_ONLY),
    "mm_processor_kwargs": ((None,), _TEXT_ONLY),
    "prediction": ((None,), "drop it: drafts are found without it"),
    "reasoning_effort": ((None,), "use /v1/chat/completions, which has it"),
    "verbosity": ((None, "medium"), "ask for it in a message"),
    "service_tier": ((None, "auto", "default"), "use priority"),
    "web_search_options": ((None,), "search yourself, and give the model a tool for it"),
    "parallel_tool_calls": ((None, True), "use /v1/chat/completions, which has tools"),
    "use_beam_search": ((None, False), "use n, or best_of of /v1/completions"),
    "length_penalty": ((None, 1, 1.0), "drop it: there is no beam search"),
    "early_stopping": ((None, False), "drop it: there is no beam search"),
    "spaces_between_special_tokens": ((None, True), "drop it: spaces are the tokenizer's own"),
    "return_tokens_as_token_ids": ((None, False), "use return_token_ids"),
    "documents": ((None, []), "put them into a message"),
    "logits_processors": ((None, []), "use logit_bias, bad_words or allowed_token_ids"),
    "guided_decoding_backend": ((None,), "drop it: there is one"),
    "guided_whitespace_pattern": ((None,), "use structured_outputs.disable_any_whitespace"),
}


def drop_what_asks_for_nothing(
    fields: Mapping[str, Any], known: Container[str], table: Neutral = NEUTRAL
) -> dict[str, Any]:
    """A request's ``fields`` without those that are not ``known`` and ask for nothing. Raises
    SurefootError for what is not offered."""
    kept = {}
    for name, value in fields.items():
        if name in known or not (name in IGNORED or name in table):
            kept[name] = value
        elif name in table:
            neutral, instead = table[name]
            if not any(_same(value, item) for item in neutral):
                raise SurefootError(name, "is not offered here", instead)
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Equal and of one type: ``True`` is not 1 here."""
    return type(value) is type(neutral) and value == neutral
