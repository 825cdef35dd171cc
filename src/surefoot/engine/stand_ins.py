"""Which recorded round may run in place of one that is not recorded yet."""

from __future__ import annotations

import math
from collections.abc import Iterable

from surefoot.speculation.size import Size

LONGEST = 4
"""How many times as many rows a round with prompts may have."""


def stand_in(size: Size, recorded: Iterable[Size]) -> Size | None:
    """The one of ``recorded`` that does what a round of ``size`` does with the least padding; None:
    there is none. It has at least as many spans, and known rows all fit. Drafts are verified if
    ``size`` verifies any: more of them or fewer, of the likeliest. Drafters draft at least as far,
    and others may propose beside them."""
    fitting = [other for other in recorded if _serves(other, size)]
    return min(fitting, key=lambda other: _waste(other, size), default=None)


def _serves(other: Size, size: Size) -> bool:
    same = (
        other.kind == size.kind
        and set(other.proposers) >= set(size.proposers)
        and bool(other.proposers) == bool(size.proposers)
        and (other.steps or 0) >= (size.steps or 0)
        and bool(other.steps) == bool(size.steps)
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


def _waste(other: Size, size: Size) -> tuple[int, int, float, int, bool]:
    """More rows than are wanted cost time, fewer cost drafts: the nearest number is best."""
    apart = abs(math.log(other.rows / size.rows))
    return other.spans, len(other.proposers), apart, other.steps or 0, other.catches_up
