"""Which recorded round may run in place of one that is not recorded yet."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.speculation.size import Size

LONGEST = 4
"""How many times as many rows a round with prompts may have."""


def stand_in(size: Size, recorded: Iterable[Size]) -> Size | None:
    """The one of ``recorded`` that does what a round of ``size`` does with the least padding; None:
    there is none. It has at least as many spans, and known rows all fit. Drafts are verified if
    ``size`` verifies any: more of them or fewer, of the likeliest."""
    fitting = [other for other in recorded if _serves(other, size)]
    return min(fitting, key=lambda other: _waste(other, size), default=None)


def _serves(other: Size, size: Size) -> bool:
    same = (
        other.kind == size.kind
        and other.proposers == size.proposers
        and other.steps == size.steps
        and other.verifies == size.verifies
        and other.logprobs == size.logprobs
        and other.scored == size.scored
        and other.masked == size.masked
        and other.has_prompts == size.has_prompts
        and other.prompt_logprobs == size.prompt_logprobs
        and other.catches_up >= size.catches_up
        and other.spans >= size.spans
    )
    if not same or not size.has_prompts:
        return same
    return other.samples >= size.samples and size.rows <= other.rows <= LONGEST * size.rows


def _waste(other: Size, size: Size) -> tuple[int, bool, int, bool]:
    fewer = other.rows < size.rows
    return other.spans, fewer, abs(other.rows - size.rows), other.catches_up
