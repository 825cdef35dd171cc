"""What an engine cannot do for a request, said before it is let in."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from surefoot.errors import SurefootError
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.registry import RESERVED


def check_texts(
    prompt: Sequence[int], params: SamplingParams, vocab: int, max_model_len: int, kv_tokens: int
) -> int:
    """Refuse token ids that the model does not have, and texts that the context or the KV pool can
    never hold. Returns how many tokens there is room for after the prompt."""
    if not prompt:
        raise SurefootError("prompt", "is empty", "give at least one token")
    for option in ("prompt", "logit_bias", "stop_token_ids", "allowed_token_ids"):
        ids = prompt if option == "prompt" else getattr(params, option) or (0,)
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab:
                raise SurefootError(option, f"token id {token} is outside 0 to {vocab - 1}")
    most = min(max_model_len, kv_tokens)
    room = most - len(prompt)
    what = "max_model_len" if max_model_len <= kv_tokens else "the KV pool"
    if room < 1:
        raise SurefootError(
            "prompt",
            f"has {len(prompt)} tokens, which with one more exceeds {what}, {most}",
            "shorten it",
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise SurefootError(
            "max_tokens",
            f"{params.max_tokens} after a prompt of {len(prompt)} tokens exceeds {what}, {most}",
            f"use at most {room}",
        )
    return room


def check_speculation(
    speculation: SpeculationParams,
    loaded: Collection[str],
    active: Collection[str],
    max_draft_tokens: int,
) -> None:
    """Refuse a method that is not among the ``active`` of the ``loaded``, and more drafts than
    there may be."""
    known = (*RESERVED, *active)
    if speculation.method not in known:
        failed = speculation.method in loaded
        problem = "failed, and was switched off" if failed else "is not loaded"
        raise SurefootError(
            "speculation.method",
            f"{speculation.method!r} {problem}",
            f"use one of {', '.join(known)}",
        )
    if (speculation.max_draft_tokens or 0) > max_draft_tokens:
        raise SurefootError(
            "speculation.max_draft_tokens",
            f"{speculation.max_draft_tokens} is above the engine's {max_draft_tokens}",
            f"use at most {max_draft_tokens}",
        )
