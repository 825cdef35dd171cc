"""A proposer with a network: what is the same whatever the network is made of."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from surefoot.errors import SurefootError
from surefoot.models.decoder import Decoder
from surefoot.speculation.drafting.folders import errors_about
from surefoot.speculation.drafting.network import Network
from surefoot.speculation.drafting.picking import Picker
from surefoot.speculation.drafting.pools import DrafterPools
from surefoot.speculation.proposer import DraftCost, DraftRequest, Drafts, Needs, Proposer
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class NetworkOptions:
    """``path``: folder or hub name of the checkpoint, or ``dummy`` for random weights.
    ``draft_tokens``: most drafts offered; None: as many as the kind does best with.
    ``coupled``: at temperature > 0 draft with the target's own noise; otherwise the likeliest
    tokens are drafted, which agree with a sampled target less often."""

    proposer: ClassVar[str]
    """Its name, for errors."""
    path: str | Path | None = None
    draft_tokens: int | None = None
    coupled: bool = True

    def __post_init__(self) -> None:
        if not self.path:
            raise SurefootError(f"{self.proposer}.path", "is missing", "name the drafter's folder")
        self.check_counts("draft_tokens")
        if not isinstance(self.coupled, bool):
            raise SurefootError(
                f"{self.proposer}.coupled", f"{self.coupled!r} is neither true nor false"
            )

    def check_counts(self, *names: str) -> None:
        """Refuse options that are neither None nor whole numbers from 1."""
        for name in names:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= 1):
                raise SurefootError(f"{self.proposer}.{name}", f"{value!r} is below 1")


class NetworkProposer(Proposer):
    """Drafts chains, a pass of the network for each draft. A kind adds how its network is built
    and how it catches up, and may draft otherwise."""

    options: NetworkOptions
    network: Network
    cost: ClassVar[DraftCost] = DraftCost.PER_STEP
    usual_drafts: ClassVar[int] = 5
    """Where the options do not say how many."""

    def __init__(self, options: NetworkOptions, state: SlotState) -> None:
        super().__init__(options, state)
        self.most = min(self.draft_tokens(options), state.max_drafts)
        """Drafts offered at once, at most."""
        self.wanted = DraftRequest()

    @property
    def option(self) -> str:
        """The option that names the checkpoint."""
        return f"{self.name}.path"

    @abstractmethod
    def build(self, target: Decoder) -> Network:
        """Load ``options.path``. SurefootErrors about it need not name the option."""

    @property
    def longest(self) -> int:
        """Most drafts in a row."""
        return self.most

    @property
    def pass_bytes(self) -> int:
        """Scratch of a pass that is large beside that of the target's rounds."""
        return 0

    @property
    def scratch_keys(self) -> int:
        """Keys that drafting writes for a request: those of the live row and of every draft but
        the last, from which nothing follows."""
        return self.longest

    def load(self, target: Decoder) -> None:
        state = self.state
        with errors_about(self.option):
            self.network = self.build(target)
        self.pools = DrafterPools(self.network, state, self.scratch_keys)
        self.picker = Picker(self.network, state, self.options.coupled)
        self._lengths = torch.arange(self.longest + 1, device=state.device)
        self._lengths = self._lengths.unsqueeze(1).repeat(1, state.slots)
        self._whole: dict[tuple[int, int], torch.Tensor] = {}

    def needs(self) -> Needs:
        network = self.network
        return Needs(
            longest_draft=self.longest,
            captured_layers=network.captured_layers,
            kv_bytes_per_token=-(-self.pools.bytes_per_block // self.state.block_size),
            fixed_bytes=network.weight_bytes + self.pools.scratch_bytes + self.pass_bytes,
            context_limit=network.max_positions + network.behind,
            cost=self.cost,
        )

    def allocate(self, blocks: int) -> None:
        with errors_about(self.option):
            self.pools.allocate(blocks)

    def expect(self, wanted: DraftRequest) -> None:
        self.wanted = wanted
        self.picker.serve(wanted.stages)

    @property
    def depth(self) -> int:
        """Most drafts in a row that are of use now."""
        return min(self.longest, self.wanted.longest or self.longest)

    def whole(self, depth: int, count: int) -> torch.Tensor:
        """int64 [count]: lengths of offers of ``depth`` drafts each."""
        found = self._whole.get((depth, count))
        if found is None:
            found = self._whole[depth, count] = self._lengths[depth, :count]
        return found

    def features_before(self) -> torch.Tensor | None:
        """[slots, hidden]: what the network reads beside the current tokens; None: nothing."""
        return None

    def propose(self, slots: torch.Tensor) -> Drafts:
        network, depth = self.network, self.depth
        live = self.pools.live_rows(slots, self.features_before(), depth, self.wanted.max_keys)
        tokens, features = live.tokens, live.features
        offered = tokens.new_empty((len(slots), depth))
        confidence = torch.empty(offered.shape, device=slots.device)
        for step in range(depth):
            rows = self.pools.rows(live, step)
            hidden, logits = network.draft(tokens, features, rows, self.pools.kv)
            tokens = offered[:, step]
            self.picker.pick(slots, live.keys[step + 1], logits, (tokens, confidence[:, step]))
            features = network.fed_back(hidden)
        return Drafts(offered, self.whole(depth, len(slots)), confidence)

    @classmethod
    def draft_tokens(cls, options: Any) -> int:
        return options.draft_tokens or cls.usual_drafts
