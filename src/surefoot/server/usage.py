"""What a request used, and what speculation did for it."""

from __future__ import annotations

from typing import Any

from surefoot.request import SpeculationStats
from surefoot.server.generation import Generation


def usage(
    generation: Generation, hidden: bool = False, reasoning: int | None = None
) -> dict[str, Any]:
    """``usage`` of an answer. Tokens after a stop string do not count; with ``hidden`` none do,
    as the text was not asked for. ``reasoning``: how many of them are, None where none can be."""
    prompt = sum(len(tokens) for tokens in generation.prompts)
    completion = 0 if hidden else sum(choice.stream.kept for choice in generation.choices)
    leaders = generation.choices[:: generation.params.n]
    details: dict[str, Any] = {}
    if reasoning is not None:
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        **details,
        "prompt_tokens_details": {"cached_tokens": sum(c.request.cached for c in leaders)},
        "speculation": speculation([choice.stream.speculation for choice in generation.choices]),
    }


def speculation(parts: list[SpeculationStats]) -> dict[str, Any]:
    """Counts of all choices together; ``accepted_length`` is tokens per round."""
    names = sorted({name for part in parts for name in part.verified_by_proposer})
    total = SpeculationStats(
        rounds=sum(part.rounds for part in parts),
        offered=sum(part.offered for part in parts),
        verified=sum(part.verified for part in parts),
        accepted=sum(part.accepted for part in parts),
    )
    return {
        "rounds": total.rounds,
        "offered": total.offered,
        "verified": total.verified,
        "accepted": total.accepted,
        "accepted_length": total.accepted_length,
        "proposers": {
            name: {
                "verified": sum(part.verified_by_proposer.get(name, 0) for part in parts),
                "accepted": sum(part.accepted_by_proposer.get(name, 0) for part in parts),
            }
            for name in names
        },
    }
