"""The contract of a proposer: whatever offers drafts for the next round.

A proposer is one file in ``proposers/`` and one line in ``registry``. It works on the slot
tensors, for all requests of a round at once, without reading tensors on the host. How many of its
drafts are verified is the controller's business, and whether they are right the target's: a wrong
offer costs time, never text.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from surefoot.config import MOST_DRAFTS
from surefoot.errors import SurefootError
from surefoot.kernels.backend import FlatBatch
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.host_proposer import HostProposer
from surefoot.speculation.state import SlotState


class DraftCost(enum.Enum):
    """What drafting costs on the device."""

    LOOKUP = enum.auto()
    """Next to nothing: there is no network."""
    PER_STEP = enum.auto()
    """A pass of a network for each draft in a row."""
    PER_BLOCK = enum.auto()
    """One pass of a network, however long the offer."""


@dataclass(frozen=True)
class Needs:
    """What a proposer takes from the engine, budgeted before the KV pool is sized."""

    longest_draft: int
    """Drafts in a row: of a tree, its depth."""
    captured_layers: tuple[int, ...] = ()
    """Layer indices whose entering residual stream it reads (see ``Decoder.forward``); (): it reads
    tokens alone."""
    kv_bytes_per_token: int = 0
    """Bytes of own pools for each position of the target's. Above 0, a prefix hit reaches only as
    far as these hold what the proposer needs of the request."""
    fixed_bytes: int = 0
    """Bytes besides: weights, state of the slots, scratch."""
    context_limit: int | None = None
    """Tokens of the longest text that it can draft for, drafts included; longer requests lose its
    drafts, not service. None: no limit."""
    trees: bool = False
    """Whether its offers are trees."""
    cost: DraftCost = DraftCost.LOOKUP

    @property
    def has_network(self) -> bool:
        return self.cost is not DraftCost.LOOKUP


@dataclass(frozen=True)
class Drafts:
    """Offers for B slots, on the device of these. Tokens beyond ``lengths`` are ignored; ids
    outside the vocabulary end an offer early, and so does the engine's ``max_draft_tokens``."""

    tokens: torch.Tensor
    """int64 [B, K], K at most ``MOST_DRAFTS``."""
    lengths: torch.Tensor
    """int64 [B]."""
    confidence: torch.Tensor
    """float32 [B, K] in 0..1: the proposer's own idea of a draft's chance, which the controller
    calibrates against what happens."""
    parents: torch.Tensor | None = None
    """int64 [B, K] for a tree: index of each draft's parent, -1 for the current token. Parents come
    first, more promising drafts before others, and siblings differ: any number of leading drafts
    is a tree that can be verified. None: a chain."""


def find_mistake(drafts: object, slots: torch.Tensor) -> str | None:
    """In what way an offer for ``slots`` int64 [B] is none, in words that follow "offers"; None:
    it is one. Reads no element: nothing waits for the device."""
    if not isinstance(drafts, Drafts):
        return f"{type(drafts).__name__} instead of Drafts"
    batch, device = slots.shape[0], slots.device
    shape = getattr(drafts.tokens, "shape", ())
    width = shape[1] if len(shape) == 2 else -1
    for name, part, dtype, wanted in (
        ("tokens", drafts.tokens, torch.int64, (batch, width)),
        ("lengths", drafts.lengths, torch.int64, (batch,)),
        ("confidence", drafts.confidence, torch.float32, (batch, width)),
        ("parents", drafts.parents, torch.int64, (batch, width)),
    ):
        if part is None and name == "parents":
            continue
        if not isinstance(part, torch.Tensor):
            return f"{name} that are {type(part).__name__}, not a tensor"
        if part.dtype != dtype or part.shape != wanted or part.device != device:
            sizes = str(list(wanted)).replace("-1", "K")
            return (
                f"{name} {_kind(part.dtype)} {list(part.shape)} on {part.device}, "
                f"not {_kind(dtype)} {sizes} on {device}"
            )
    if width > MOST_DRAFTS:
        return f"{width} drafts at once, more than {MOST_DRAFTS}"
    return None


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class DraftRequest:
    """What the host knows of the drafts that will be asked for; the same for many rounds."""

    stages: SamplingStages = SamplingStages()
    """That some request of the round needs."""
    max_keys: int = 0
    """Upper bound of the requests' ``length`` after this round."""
    longest: int = 0
    """Longest draft that can be of use."""


class Commits(NamedTuple):
    """What a round settled for B slots: so many rows of each now have final KV (and features)."""

    slots: torch.Tensor
    """int64 [B]."""
    counts: torch.Tensor
    """int64 [B]."""
    rows: torch.Tensor
    """int64 [B]: index of each slot's first row in the round's flat batch."""
    batch: FlatBatch
    """The flat batch itself: N rows, those of rejected drafts and of padding included."""
    features: torch.Tensor
    """[N, captured * hidden]: the layers of ``Needs.captured_layers`` side by side."""
    before: torch.Tensor | None = None
    """int64 [N]: the flat row of the position before each row's, -1 for a span's first. None: the
    row's neighbour."""
    last: torch.Tensor | None = None
    """int64 [B]: the flat row of each slot's last settled position. None: the last of ``counts``
    neighbours."""
    served: torch.Tensor | None = None
    """bool [slots]: whose requests allow the proposer. Of the others it needs to keep nothing, and
    nobody will ask for it: neither in these slots nor by a prefix hit on their blocks. None:
    everybody's, or the proposer has no network."""

    @property
    def first(self) -> torch.Tensor:
        """int64 [B]: the position of each slot's first row; anything where it has none."""
        keys = self.batch.key_index
        return keys[self.rows.clamp(max=len(keys) - 1)]

    @property
    def row_slot(self) -> torch.Tensor:
        """int64 [N]: ``batch.row_slot``, -1 also for rows that are not served."""
        slots = self.batch.row_slot
        return slots if self.served is None else torch.where(self.served[slots], slots, -1)


class Proposer(ABC):
    """Base class. ``Options`` is a frozen dataclass with the proposer's settings."""

    name: ClassVar[str]
    Options: ClassVar[type]
    replayable: ClassVar[bool] = True
    """Whether an offer depends on nothing but the request's own committed text (and on what the
    target computes from it), so that any engine that reaches this text offers the same; the
    certificate then checks that no state is stale. False for a proposer that learns from other
    requests or draws its drafts at random."""

    has_raised = False
    """Whether a method that rounds call ever raised an exception."""

    def __init__(self, options: Any, state: SlotState) -> None:
        self.options = options
        self.state = state

    @abstractmethod
    def needs(self) -> Needs:
        """What this proposer takes, given its options."""

    @classmethod
    def draft_tokens(cls, options: Any) -> int | None:
        """Most drafts that it offers at once with these options, an option ``draft_tokens`` among
        them if it has one; None: as many as there may be."""
        return getattr(options, "draft_tokens", None)

    @abstractmethod
    def propose(self, slots: torch.Tensor) -> Drafts:
        """Offer drafts that follow the committed tokens of ``slots`` int64 [B]."""

    def catch_up(self, commits: Commits) -> None:
        """Bring own state (drafter KV) up to the committed tokens. Not called for a round in which
        no request allows a proposer with a network; which may be called while a round that
        verifies no drafts still samples, so that texts and lengths in ``state`` change meanwhile:
        it goes by ``commits``. Default: there is no state."""

    def admit(self, slots: torch.Tensor, found: Sequence[int]) -> None:
        """Requests, new or resumed, entered ``slots`` int64 [B]; of each, so many leading positions
        were ``found`` in the prefix cache, in the blocks of ``state.block_tables``. Default:
        nothing to reset."""

    def load(self, target: Decoder) -> None:
        """Load a network for this target, before ``needs`` is asked. Default: there is none."""

    def allocate(self, blocks: int) -> None:
        """Make own KV pools of ``blocks`` blocks, under the target's block ids. Default: none."""

    def expect(self, wanted: DraftRequest) -> None:
        """What the next ``propose`` is about. Default: it does not matter."""

    @classmethod
    def inspect(cls, path: str, target: ModelConfig | None) -> dict[str, Any] | None:
        """JSON-ready facts about the drafter in the local folder ``path``, and whether it fits
        ``target``; None if it is none of this kind. Default: there are no files."""
        return None


class blamed:
    """What ``proposer`` raises in ``method`` goes on as it is, with a note that says so, and is
    remembered. (No generator: every round of a small model waits for it, more than once.)"""

    def __init__(self, proposer: Proposer | HostProposer, method: str) -> None:
        self._proposer = proposer
        self._method = method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._proposer.has_raised = True
            error.add_note(f"raised by proposer {self._proposer.name!r} in {self._method}()")


def read_options(proposer: type[Proposer] | type[HostProposer], values: Mapping[str, Any]) -> Any:
    """A proposer's ``Options`` from named values; unknown names are refused."""
    known = [item.name for item in fields(proposer.Options)]
    for name in values:
        if name not in known:
            raise SurefootError(
                f"{proposer.name}.{name}", "is no option", f"known: {', '.join(known) or 'none'}"
            )
    return proposer.Options(**values)
