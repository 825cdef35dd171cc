"""The DFlash family in the round: one pass of a small network drafts a block.

After every round it *catches up*: each position whose target KV was written gets its entry in the
keys and values of all the drafter's layers, from the target's feature at that position alone. To
*propose*, the current token and the masks behind it run as one block for all requests at once; its
own keys lie in scratch blocks and are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.speculation.drafting.proposer import NetworkOptions, NetworkProposer
from surefoot.speculation.proposer import Commits, DraftCost, Drafts
from surefoot.speculation.proposers.dflash.checkpoint import (
    DUMMIES,
    checkpoint_facts,
    drafts_of,
    dummy_checkpoint,
    open_checkpoint,
)
from surefoot.speculation.proposers.dflash.heads import ConfidenceHead, Rows, walk_of
from surefoot.speculation.proposers.dflash.network import DFlashNetwork, layer_bytes
from surefoot.speculation.size import GREEDY

MOST_LOGIT_ROWS = 256
"""Rows whose logits are in memory at once, but for those of one draft of every request. Fewer would
read the head's weights more often than its arithmetic takes."""


@dataclass(frozen=True)
class DFlashOptions(NetworkOptions):
    """As ``NetworkOptions``. ``path`` may also be ``dummy-dspark`` or ``dummy-dflash2``, for random
    weights of these; ``draft_tokens`` None: as many as a block gives."""

    proposer: ClassVar[str] = "dflash"


class DFlashProposer(NetworkProposer):
    name = "dflash"
    Options = DFlashOptions
    options: DFlashOptions
    network: DFlashNetwork
    cost = DraftCost.PER_BLOCK

    @classmethod
    def draft_tokens(cls, options: DFlashOptions) -> int:
        most = drafts_of(str(options.path))
        if (options.draft_tokens or most) > most:
            raise SurefootError(
                "dflash.draft_tokens", f"{options.draft_tokens} is above the {most} of a block"
            )
        return options.draft_tokens or most

    def build(self, target: Decoder) -> DFlashNetwork:
        path, backend = str(self.options.path), target.backend
        if path in DUMMIES:
            checkpoint = dummy_checkpoint(path, target.config, backend.device, backend.dtype)
        else:
            checkpoint = open_checkpoint(path)
        network = DFlashNetwork(checkpoint, target)
        self.walk = walk_of(checkpoint, network)
        self.confidence = None
        if checkpoint.config.confidence:
            self.confidence = ConfidenceHead(checkpoint, backend)
        return network

    @property
    def scratch_keys(self) -> int:
        """Those of a block."""
        return self.network.block

    @property
    def pass_bytes(self) -> int:
        """Activations of a block for every request, and what heads make of some of its rows."""
        config, requests = self.network.config, self.state.slots
        rows = min(max(MOST_LOGIT_ROWS, requests), requests * config.most_drafts)
        itemsize = self.network.backend.dtype.itemsize
        heads = 4 * config.draft_vocab_size * rows
        if config.markov is not None:
            # Sums with what the head says; or counts and shifts, where logits are adjusted.
            heads += 2 * 4 * config.draft_vocab_size * requests
        if config.selector is not None:
            heads += 3 * 4 * config.selector.top_k * config.selector.rank * rows
        return heads + layer_bytes(config.layer, requests * config.block_size, itemsize)

    def catch_up(self, commits: Commits) -> None:
        # Of a tree, what is settled are no neighbours.
        settled = (commits.rows, commits.counts) if commits.last is None else None
        self.network.write_context(
            commits.features, commits.batch, self.pools.kv, commits.served, settled
        )

    def allocate(self, blocks: int) -> None:
        super().allocate(blocks)
        self.at_once, state = None, self.state
        weights = self.walk.weights(self.network, self.confidence, MOST_LOGIT_ROWS)
        if weights is not None:
            self.at_once = self.network.drafting.block_drafter(
                weights, self.pools.kv, state.history, state.length, state.block_tables
            )
        """What drafts the likeliest tokens, where the device does that at once."""

    def propose(self, slots: torch.Tensor) -> Drafts:
        network, depth, count = self.network, self.depth, slots.shape[0]
        if self.at_once is not None and self.picker.stages == GREEDY:
            scratch = self.pools.scratch(self.wanted.max_keys)
            tokens, chances = self.at_once.draft(slots, depth, scratch)
            return Drafts(tokens, self.whole(depth, count), chances)
        # A block has no more masks than drafts are wanted: fewer draft as well, and cost less.
        rows = network.config.first_row + depth
        live = self.pools.live_rows(slots, None, depth, self.wanted.max_keys)
        batch = self.pools.block(live, rows, network.config.mask_token_id)
        hidden = network.step(None, batch, self.pools.kv).view(count, rows, -1)
        first = network.config.first_row
        hidden = hidden[:, first : first + depth]
        alone = self.walk.by_row and self.confidence is None and network.bare_logits
        if alone and self.picker.stages == GREEDY:
            tokens, chances = network.likeliest(hidden, MOST_LOGIT_ROWS)
            return Drafts(tokens, self.whole(depth, count), chances)
        hidden = hidden.transpose(0, 1).contiguous()
        normed = None
        if self.walk.reads_hidden or self.confidence is not None:
            normed = network.normed(hidden.flatten(0, 1)).view_as(hidden)
        tokens = torch.empty((depth, count), dtype=torch.int64, device=slots.device)
        chances = torch.empty((depth, count), device=slots.device)
        places = live.keys[1 : depth + 1]

        def parts() -> Iterator[Rows]:
            together = max(1, MOST_LOGIT_ROWS // count)
            for at in range(0, depth, together):
                part = slice(at, min(at + together, depth))
                logits = network.logits(hidden[part].flatten(0, 1))
                yield Rows(
                    logits.view(part.stop - at, count, -1),
                    None if normed is None else normed[part],
                    places[part],
                    tokens[part],
                    chances[part],
                )

        self.walk.pick(self.picker, slots, live.tokens, parts())
        if self.confidence is not None and normed is not None:
            before = torch.cat((live.tokens.unsqueeze(0), tokens[:-1]))
            chances = self.confidence(normed, before)
        return Drafts(tokens.t().contiguous(), self.whole(depth, count), chances.t().contiguous())

    @classmethod
    def inspect(cls, path: str, target: ModelConfig | None) -> dict[str, Any] | None:
        return checkpoint_facts(path, target)
