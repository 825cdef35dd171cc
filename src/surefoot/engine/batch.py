"""Who takes part in a round, and what follows from who they are. Host-side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress

import numpy as np

from surefoot.request import Request, SpeculationParams
from surefoot.sampling.logprobs import width_for
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.size import kind_of
from surefoot.speculation.state import slots_of


@dataclass(frozen=True)
class Wishes:
    """What a request wants of its rounds. All that want the same share one: hundreds of requests
    are gone through whenever somebody joins or leaves."""

    stages: SamplingStages
    speculation: SpeculationParams
    declined: frozenset[str]
    logprobs: int | None
    masked: bool

    def allows(self, proposer: str) -> bool:
        """Whether the proposer may draft for such a request."""
        return proposer not in self.declined and self.speculation.allows(proposer)

    @classmethod
    def note(cls, requests: Iterable[Request]) -> None:
        """Find out for requests that were just let in."""
        for each in requests:
            speculation, logprobs = each.speculation, each.params.logprobs
            masked = each.grammar is not None
            stages = SamplingStages.of((each.params,))
            each.wishes = _shared(stages, speculation, each.declined, logprobs, masked)


_shared = lru_cache(maxsize=1024)(Wishes)
"""One for all that are equal."""


@dataclass(frozen=True, eq=False)
class Group:
    """Requests, and what their rounds need on their account."""

    requests: tuple[Request, ...]
    slots: np.ndarray
    """int64 [n]."""
    kind: SamplingStages
    proposers: tuple[int, ...]
    """Those that some request allows, rising."""
    draft_limit: int
    """The largest of their own limits."""
    logprobs: int | None
    """The width of logprobs that serves all who want any."""
    scored: tuple[int, ...]
    """The places of these, rising."""
    masked: bool
    """Whether some have a grammar."""


def group(
    requests: Sequence[Request],
    names: Mapping[int, str],
    max_drafts: int,
    slots: np.ndarray | None = None,
) -> Group:
    """``names``: of the proposers that may offer, by index; ``max_drafts``: the engine's limit.
    ``slots`` int64 [n]: those of the requests, where somebody knows them."""
    # By identity, as to compare them takes long.
    kinds = {id(each.wishes): each.wishes for each in requests}.values()
    limits = [
        max_drafts if limit is None else limit
        for limit in (each.speculation.max_draft_tokens for each in kinds)
    ]
    widths = [each.logprobs for each in kinds if each.logprobs is not None]
    scored: tuple[int, ...] = ()
    if widths:
        places = enumerate(requests)
        scored = tuple(place for place, each in places if each.params.logprobs is not None)
    return Group(
        requests=tuple(requests),
        slots=slots_of(requests) if slots is None else slots,
        kind=SamplingStages.together(each.stages for each in kinds),
        proposers=tuple(
            index for index, name in names.items() if any(each.allows(name) for each in kinds)
        ),
        draft_limit=max(limits, default=0),
        logprobs=width_for(max(widths)) if widths else None,
        scored=scored,
        masked=any(each.masked for each in kinds),
    )


class Members:
    """Requests that come and go, in the order in which they came. Where hundreds run, somebody does
    in every other round: who went is found in arrays, instead of asking each."""

    def __init__(self, left: np.ndarray) -> None:
        """``left`` int64 [slots]: how often each slot was left so far, which somebody counts."""
        self._left = left
        self.requests: list[Request] = []
        self._slots = self._since = np.empty(0, dtype=np.int64)
        """int64 [n]: of the requests; and as of ``left``, when they came."""

    def __len__(self) -> int:
        return len(self.requests)

    def drop_left(self) -> bool:
        """Forget those who have left their slots; returns whether there were any."""
        stays = self._left[self._slots] == self._since
        if stays.all():
            return False
        self.requests = list(compress(self.requests, stays.tolist()))
        self._slots, self._since = self._slots[stays], self._since[stays]
        return True

    def join(self, requests: Sequence[Request]) -> None:
        """These run, and belong to them from now on."""
        slots = slots_of(requests)
        self._slots = np.concatenate((self._slots, slots))
        self._since = np.concatenate((self._since, self._left[slots]))
        self.requests += requests

    def group(self, names: Mapping[int, str], max_drafts: int) -> Group:
        """All of them, as of ``group``."""
        return group(self.requests, names, max_drafts, self._slots)


def join(first: Group, second: Group) -> Group:
    """Both, in this order."""
    widths = [each for each in (first.logprobs, second.logprobs) if each is not None]
    return Group(
        requests=first.requests + second.requests,
        slots=np.concatenate((first.slots, second.slots)),
        kind=SamplingStages.together((first.kind, second.kind)),
        proposers=tuple(sorted({*first.proposers, *second.proposers})),
        draft_limit=max(first.draft_limit, second.draft_limit),
        logprobs=max(widths, default=None),
        scored=first.scored + tuple(len(first.requests) + place for place in second.scored),
        masked=first.masked or second.masked,
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """The spans of a round: prompt chunks first, then requests with a current token."""

    group: Group
    chunks: tuple[int, ...]
    """Rows of each prompt chunk; the other spans have one row of known tokens."""
    ending: int
    """Of the chunks, those that reach the current token, so that the round samples for them."""
    prompt_load: int = 0
    """Rows at the beginning of a prompt that take as long as those of the chunks."""

    @cached_property
    def count(self) -> int:
        return len(self.group.requests)

    @cached_property
    def only_slot(self) -> int | None:
        """Of a request that is the only one, and decodes; else None."""
        return int(self.group.slots[0]) if self.count == 1 and not self.chunks else None

    @cached_property
    def prompt_rows(self) -> int:
        return sum(self.chunks)

    @cached_property
    def decoding(self) -> int:
        return self.count - len(self.chunks)

    @cached_property
    def samples(self) -> int:
        """Spans that sample."""
        return self.decoding + self.ending

    @property
    def sampling_slots(self) -> np.ndarray:
        """int64 [samples]: of those that decode, and then of those at the end of their prompt."""
        slots, chunks = self.group.slots, len(self.chunks)
        return np.concatenate((slots[chunks:], slots[: self.ending])) if chunks else slots

    @cached_property
    def rows(self) -> int:
        """Rows of known tokens."""
        return self.prompt_rows + self.decoding

    def beside(self, drafts: int, most: int) -> Batch:
        """With the last prompt chunks so much shorter that known tokens and ``drafts`` are no more
        than ``most`` rows: rounds larger than that are padded, and what they lose comes with the
        next one. An eighth of the prompts' rows at most is put off so."""
        cut = min(self.rows + drafts - most, self.prompt_rows // 8)
        if cut <= 0:
            return self
        chunks, whole = list(self.chunks), len(self.chunks)
        for place in reversed(range(whole)):
            taken = min(cut, chunks[place] - 1)
            if taken > 0:
                chunks[place], cut, whole = chunks[place] - taken, cut - taken, place
        if whole == len(chunks):
            return self
        # Chunks that do not reach the end of their prompts are the last ones.
        return replace(self, chunks=tuple(chunks), ending=min(self.ending, whole))

    @property
    def quota(self) -> np.ndarray:
        """int64 [spans]: the most known rows that each of them runs."""
        rows = np.ones(self.count, dtype=np.int64)
        rows[: len(self.chunks)] = self.chunks
        return rows

    @cached_property
    def kind(self) -> SamplingStages:
        """The recorded kind of sampling that serves all."""
        return kind_of(self.group.kind)
