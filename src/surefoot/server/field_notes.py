"""What the API's document says of fields beside their types: descriptions, ranges and defaults. A
docstring behind a field goes before what stands here; ranges are those that ``params`` checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.params import RANGES, Range, SamplingParams

_DEFAULTS = SamplingParams()
_TOKEN = Range(0, None, whole=True)
_COUNT = Range(1, None, whole=True)
# By the fields' names; what is not here is as in ``SamplingParams``.
_RANGES: Mapping[str, Range] = {
    **RANGES,
    "top_logprobs": RANGES["logprobs"],
    "max_completion_tokens": RANGES["max_tokens"],
    "max_output_tokens": RANGES["max_tokens"],
    "max_draft_tokens": Range(0, None, whole=True),
    "truncate_prompt_tokens": Range(-1, None, whole=True),
    "best_of": _COUNT,
    "logit_bias": Range(-100, 100),
    "stop_token_ids": _TOKEN,
    "allowed_token_ids": _TOKEN,
    "tokens": _TOKEN,
}
# More of what is refused, by the fields' names, for the member of the given type.
_REFUSED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "allowed_token_ids": {"array": {"minItems": 1}},
    "bad_words": {"array": {"items": {"type": "string", "minLength": 1}}},
    "guided_choice": {"array": {"minItems": 1}},
    "choice": {"array": {"minItems": 1}},
    "stop": {
        "string": {"minLength": 1},
        "array": {"items": {"type": "string", "minLength": 1}},
    },
    "logit_bias": {"object": {"propertyNames": {"pattern": "^[0-9]+$"}}},
    "method": {"string": {"minLength": 1}},
    "truncate_prompt_tokens": {"integer": {"not": {"const": 0}}},
}
_MODEL_S = "Default: what the model recommends, else that of this document."
_SAME_TEXT = "The text is the same whatever it says."

DESCRIPTIONS: Mapping[str, str] = {
    "model": "The model's name, as /v1/models lists it. Default: the one that is served.",
    "prompt": "A text, a list of token ids, or a list of either.",
    "messages": "The conversation so far, the oldest message first.",
    "input": "What to answer or to embed: a text, or a list.",
    "instructions": "A system message before the input.",
    "system": "A system message before the conversation.",
    "n": "How many texts to generate for each prompt.",
    "best_of": "Of so many texts, the n with the best mean logprob are returned.",
    "temperature": f"0 always takes the likeliest token. {_MODEL_S}",
    "top_p": "The likeliest tokens that together have this probability are kept; 1 keeps all. "
    + _MODEL_S,
    "top_k": f"So many of the likeliest tokens are kept; 0 or -1 keeps all. {_MODEL_S}",
    "min_p": "Tokens less likely than this share of the likeliest one's probability are dropped. "
    + _MODEL_S,
    "repetition_penalty": "Above 1, tokens that occur in the prompt or the text become less "
    f"likely; below, more. {_MODEL_S}",
    "presence_penalty": "Subtracted from the logit of every token that occurs in the text.",
    "frequency_penalty": "Subtracted from a token's logit for every time it occurs in the text.",
    "logit_bias": "Added to logits, by token id.",
    "seed": "The same seed gives the same text every time. Default: a fresh one.",
    "max_tokens": "Most tokens of the text. Default: 16 for a plain completion, else what the "
    "model recommends, or to the end of the context.",
    "max_completion_tokens": "Another name for max_tokens.",
    "max_output_tokens": "Most tokens of the answer. Default: to the end of the context.",
    "min_tokens": "So many tokens come before any end of the text.",
    "stop": "Texts before whose first occurrence the answer ends.",
    "stop_sequences": "Texts before whose first occurrence the answer ends.",
    "stop_token_ids": "Tokens that end the text.",
    "ignore_eos": "Whether the model's end tokens do not end the text.",
    "include_stop_str_in_output": "Whether a text ends behind its stop string, not before it.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "bad_words": "Texts that must not occur in the answer.",
    "allowed_token_ids": "No other tokens are sampled, end tokens included.",
    "truncate_prompt_tokens": "The last so many tokens of a prompt are taken; -1: as many as there "
    "is room for.",
    "priority": "Requests with lower ones are let in first.",
    "request_id": "The request's id, as in the header x-request-id.",
    "logprobs": "Logprobs of the text's tokens: of chats whether to report them, of completions "
    "how many of the likeliest at each position.",
    "top_logprobs": "How many of the likeliest tokens to report at each position; needs logprobs.",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "stream": "Whether the answer comes as server-sent events while it is generated.",
    "stream_options": "What a stream tells beside the text; needs stream.",
    "include_usage": "Whether a last chunk has the usage.",
    "include_obfuscation": "Padding against eavesdroppers, which is not offered.",
    "echo": "Whether the prompt is put before the text.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens to a prompt.",
    "add_generation_prompt": "Whether the template's beginning of an answer follows the messages.",
    "continue_final_message": "Whether the answer continues the last message instead; needs "
    "add_generation_prompt false.",
    "chat_template_kwargs": "More variables for the chat template.",
    "response_format": "The form of the answer: text, any JSON, or JSON of a schema.",
    "json_schema": "The schema, for the type json_schema.",
    "structured_outputs": "What the text has to fit; one of its fields.",
    "json": "A JSON schema that the text has to fit.",
    "json_object": "Whether the text has to be a JSON object.",
    "regex": "A regular expression that the text has to match.",
    "choice": "Texts of which the answer has to be one.",
    "grammar": "A grammar, in the form of Lark, that the text has to fit.",
    "disable_any_whitespace": "Whether JSON has no white space between its parts.",
    "guided_json": "A JSON schema that the text has to fit.",
    "guided_regex": "A regular expression that the text has to match.",
    "guided_choice": "Texts of which the answer has to be one.",
    "guided_grammar": "A grammar, in the form of Lark, that the text has to fit.",
    "speculation": f"Who may draft: a method, or a method and a limit. {_SAME_TEXT}",
    "method": f"auto, off, or a loaded proposer's name. {_SAME_TEXT}",
    "max_draft_tokens": "Most drafts that a round verifies.",
    "surefoot": "What to report beside the text.",
    "proposed_by": "Whether to tell which proposer each token was drafted by.",
    "return_token_ids": "Whether to report the ids of the text's tokens.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether it may, must or must not call one, or which it must call.",
    "chat_template": "A chat template instead of the model's; only if the server trusts its "
    "clients.",
    "enable_thinking": "Whether the model is to think before it answers, if its template asks.",
    "reasoning_effort": "How much it is to think, if its template asks.",
    "thinking": "Whether the model is to think before it answers, if its template asks.",
    "budget_tokens": "Read and not enforced.",
    "display": "Whether what the model thinks is told.",
    "effort": "How much the model is to think, if its template asks.",
    "summary": "What to tell of what the model thinks.",
    "output_config": "The form of the answer, and how much the model is to think.",
    "include": "What to tell beside the answer.",
    "metadata": "Returned as it was sent.",
    "encoding_format": "How vectors are written.",
    "normalize": "Whether vectors have length 1.",
    "text": "The text, or the form of the answer.",
    "format": "The form of the answer: text, or JSON of a schema.",
    "verbosity": "How long the answer is to be, if the model's template asks.",
    "disable_parallel_tool_use": "Whether an answer is one call at most.",
    "parallel_tool_calls": "Whether an answer may be several calls.",
    "inference_geo": "Read, and of no effect.",
    "user_profile_id": "Read, and of no effect.",
    "workspace_id": "Read, and of no effect.",
    "return_token_strs": "Whether to report each token's text, too.",
    "tokens": "Token ids.",
    "role": "Who says it.",
    "content": "What is said: a text, or parts of one.",
    "name": "A name.",
    "description": "What it is for; the model may read it.",
    "parameters": "A JSON schema of the function's arguments.",
    "schema": "A JSON schema.",
    "strict": "Whether it has to fit the schema.",
    "arguments": "A JSON object, as text.",
    "function": "The function.",
    "id": "The call's id, which its result names.",
    "index": "The call's place in its message.",
    "type": "The kind.",
    "tool_calls": "The calls that an assistant's message made.",
    "tool_call_id": "The call that a tool's message is the result of.",
    "reasoning": "What the model thinks before it answers.",
    "reasoning_content": "What the model thought before it answered.",
}
"""By the fields' names."""


def note(properties: Mapping[str, dict[str, Any]]) -> None:
    """Complete a schema's ``properties`` in place."""
    for name, field in properties.items():
        if name in DESCRIPTIONS:
            field.setdefault("description", DESCRIPTIONS[name])
        if name in _RANGES:
            _bound(field, _RANGES[name])
        for kind, refused in _REFUSED.get(name, {}).items():
            for member in field.get("anyOf", (field,)):
                if member.get("type") == kind:
                    member.update(refused)
        default = getattr(_DEFAULTS, name, None)
        if default is not None and field.get("default", ...) is None:
            field["default"] = default


def note_defaults(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Set the defaults that this server's model recommends."""
    for schema in document["components"]["schemas"].values():
        for name in defaults.keys() & schema.get("properties", {}).keys():
            if name != "max_tokens" and "default" in schema["properties"][name]:
                schema["properties"][name]["default"] = defaults[name]


def _bound(schema: dict[str, Any], bounds: Range) -> None:
    """Of a number, or of those in lists and objects."""
    kind = schema.get("type")
    if kind in ("integer", "number"):
        low = "exclusiveMinimum" if bounds.open_low else "minimum"
        schema.setdefault(low, bounds.low)
        schema.setdefault("maximum", bounds.most)
    for inner in (
        *schema.get("anyOf", ()),
        schema.get("items"),
        schema.get("additionalProperties"),
    ):
        if isinstance(inner, dict):
            _bound(inner, bounds)
