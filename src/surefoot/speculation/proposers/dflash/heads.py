"""From the rows of a block to drafts: row by row, or as a walk in which each pick says something
about the next row (DSpark's Markov head, DFlash 2's path selector); and DSpark's confidence head.

A walk picks with the request's parameters and the target's noise (``Picker``), whatever the logits
are conditioned on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from surefoot.kernels.backend import Backend
from surefoot.kernels.block_drafting import BlockWeights
from surefoot.kernels.quant import dense
from surefoot.speculation.drafting.picking import Picker
from surefoot.speculation.proposers.dflash.checkpoint import DFlashCheckpoint
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.speculation.size import GREEDY


@dataclass(frozen=True)
class Rows:
    """Some neighbouring rows of the blocks of B requests, ``g`` of each."""

    logits: torch.Tensor
    """float32 [g, B, draft vocabulary]."""
    hidden: torch.Tensor | None
    """[g, B, hidden] after the final norm, for heads that read it."""
    positions: torch.Tensor
    """int64 [g, B]: of the drafts that these rows give."""
    tokens: torch.Tensor
    """int64 [g, B]: where these go."""
    chances: torch.Tensor
    """float32 [g, B]: where the chances go that the drafter gives them."""


class Walk(ABC):
    """Picks the drafts of blocks."""

    reads_hidden = True
    by_row = False
    """Whether a row's likeliest token is that of its logits."""

    @abstractmethod
    def pick(
        self, picker: Picker, slots: torch.Tensor, current: torch.Tensor, parts: Iterator[Rows]
    ) -> None:
        """Pick the drafts of all ``parts``, which follow each other, for ``slots`` int64 [B] whose
        ``current`` tokens are int64 [B]."""

    def weights(
        self, network: DFlashNetwork, confidence: ConfidenceHead | None, most_rows: int
    ) -> BlockWeights | None:
        """All of the drafter, for kernels that draft its blocks at once, with logits of at most
        ``most_rows`` rows; None where it has parts that these do not know."""
        return None


class RowByRow(Walk):
    """Rows that know nothing of each other's tokens (DFlash)."""

    reads_hidden = False
    by_row = True

    def pick(
        self, picker: Picker, slots: torch.Tensor, current: torch.Tensor, parts: Iterator[Rows]
    ) -> None:
        for part in parts:
            if picker.chained:
                for logits, place, *out in zip(
                    part.logits, part.positions, part.tokens, part.chances, strict=True
                ):
                    picker.pick(slots, place, logits, (out[0], out[1]))
                continue
            owner = slots.repeat(len(part.logits))
            out = part.tokens.flatten(), part.chances.flatten()
            picker.pick(owner, part.positions.flatten(), part.logits.flatten(0, 1), out)


class MarkovChain(Walk):
    """Adds to each row's logits what the token before says (DSpark)."""

    def __init__(self, checkpoint: DFlashCheckpoint, backend: Backend) -> None:
        shape, tensors = checkpoint.config.markov, checkpoint.tensors
        assert shape is not None
        self.backend, self.kind, self.rank = backend, shape.kind, shape.rank
        self.confident = checkpoint.config.confidence
        """Whether another head says how likely drafts are."""
        self.reads_hidden = shape.kind != "vanilla"
        self.before, _ = backend.pack_embedding(tensors["markov_head.markov_w1.weight"])
        self.after = backend.pack_linear([tensors["markov_head.markov_w2.weight"]])
        name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(shape.kind)
        self.gate: Any = None
        if name is not None:
            weight, bias = (tensors[f"markov_head.{name}.{part}"] for part in ("weight", "bias"))
            self.gate = backend.pack_linear([weight], dense(bias))

    def pick(
        self, picker: Picker, slots: torch.Tensor, current: torch.Tensor, parts: Iterator[Rows]
    ) -> None:
        previous, state = current, None
        for part in parts:
            out = part.tokens, None if self.confident else part.chances
            head = self.before, self.after
            if self.kind == "vanilla" and picker.pick_markov(
                slots, previous, part.positions, part.logits, head, out
            ):
                previous = part.tokens[-1]
                continue
            for step, logits in enumerate(part.logits):
                hidden = None if part.hidden is None else part.hidden[step]
                logits, state = self.conditioned(logits, previous, hidden, state)
                previous = part.tokens[step]
                picker.pick(slots, part.positions[step], logits, (previous, part.chances[step]))

    def weights(
        self, network: DFlashNetwork, confidence: ConfidenceHead | None, most_rows: int
    ) -> BlockWeights | None:
        """Not for the other kinds of this head, nor with DFlash 2's parts."""
        config = network.config
        known = self.kind == "vanilla" and network.bare_logits and not network.convolutions
        if not known or self.confident is not (confidence is not None):
            return None
        return BlockWeights(
            table=network.table,
            mask_embedding=network.mask_embedding,
            embedding_scale=config.embedding_scale,
            layers=network.stack,
            seen=network.seen,
            rope=network.rope,
            norm=network.norm,
            eps=network.eps,
            head=network.head,
            ids=network.target_ids,
            before=self.before,
            after=self.after,
            of_hidden=None if confidence is None else confidence.hidden.contiguous(),
            of_token=None if confidence is None else confidence.of_token.contiguous(),
            first_row=config.first_row,
            filler=config.mask_token_id,
            first_key=network.first_key,
            behind=network.behind,
            last_position=network.last_position,
            most_rows=most_rows,
        )

    def conditioned(
        self,
        logits: torch.Tensor,
        previous: torch.Tensor,
        hidden: torch.Tensor | None,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A row's logits [B, draft vocabulary] given the tokens before it, ids of the target, int64
        [B]; and the state [B, rank] for the next row, where there is one."""
        backend = self.backend
        if self.kind == "vanilla":
            return backend.drafting.add_looked_up(logits, self.after, self.before, previous), None
        embedded = backend.embed(self.before, previous)
        if self.kind == "gated":
            assert hidden is not None
            gate = backend.linear(self.gate, torch.cat((hidden, embedded), dim=1))
            embedded = gate.sigmoid() * embedded
        else:
            assert hidden is not None
            state = torch.zeros_like(embedded) if state is None else state
            joint = backend.linear(self.gate, torch.cat((state, embedded, hidden), dim=1))
            kept, candidate, embedded = joint.chunk(3, dim=1)
            kept, embedded = kept.sigmoid(), embedded.tanh()
            state = kept * state + (1 - kept) * candidate.tanh()
        return backend.drafting.add_linear(logits, self.after, embedded), state


class PathSelector(Walk):
    """Walks through the best candidates of each row (DFlash 2)."""

    def __init__(self, checkpoint: DFlashCheckpoint, backend: Backend) -> None:
        shape, tensors = checkpoint.config.selector, checkpoint.tensors
        assert shape is not None
        self.backend, self.top_k = backend, shape.top_k
        device, dtype = backend.device, backend.dtype
        self.before = dense(tensors["candidate_selector.predecessor_codebook"]).to(device, dtype)
        self.after = dense(tensors["candidate_selector.successor_codebook"]).to(device, dtype)
        hidden = tensors["candidate_selector.hidden_projection.weight"]
        self.projection = backend.pack_linear([hidden])

    def pick(
        self, picker: Picker, slots: torch.Tensor, current: torch.Tensor, parts: Iterator[Rows]
    ) -> None:
        previous, likeliest = current, picker.stages == GREEDY
        for part in parts:
            unary, candidates = part.logits.topk(self.top_k, dim=-1)
            edges = self.edges(part, candidates)
            for step, tokens in enumerate(part.tokens):
                scores = self.scores(unary[step], edges[step], previous)
                chances, choices = part.chances[step], candidates[step]
                if likeliest:
                    best = scores.argmax(dim=1, keepdim=True)
                    tokens.copy_(choices.gather(1, best).squeeze(1))
                    chances.copy_(scores.softmax(dim=1).gather(1, best).squeeze(1))
                else:
                    # The sampler wants the vocabulary; whatever is no candidate is ruled out.
                    whole = part.logits[step].fill_(float("-inf")).scatter_(1, choices, scores)
                    picker.pick(slots, part.positions[step], whole, (tokens, chances))
                previous = tokens

    def edges(self, part: Rows, candidates: torch.Tensor) -> torch.Tensor:
        """What a predecessor's codes meet: float32 [g, B, top_k, rank]."""
        assert part.hidden is not None
        rows = part.hidden.flatten(0, 1)
        codes = self.backend.linear(self.projection, rows).float()
        codes = codes.view(*candidates.shape[:2], 1, -1)
        return embedding(candidates, self.after).float() * codes

    def scores(
        self, unary: torch.Tensor, edges: torch.Tensor, previous: torch.Tensor
    ) -> torch.Tensor:
        """Of a row's candidates, float32 [B, top_k], given the tokens before it int64 [B]."""
        codes = embedding(previous, self.before).float()
        return unary + (edges * codes.unsqueeze(1)).sum(dim=2)


class ConfidenceHead:
    """The chance that a draft is accepted if all before it are, from its row's hidden state and, as
    the checkpoint has it, the token before. In float32; what that token adds is worked out for the
    whole vocabulary when it is made."""

    def __init__(self, checkpoint: DFlashCheckpoint, backend: Backend) -> None:
        config, tensors, device = checkpoint.config, checkpoint.tensors, backend.device
        weight = dense(tensors["confidence_head.proj.weight"]).to(device).float().flatten()
        self.hidden, of_token = weight.split(
            (config.layer.hidden_size, len(weight) - config.layer.hidden_size)
        )
        bias = dense(tensors["confidence_head.proj.bias"]).to(device).float()
        self.of_token = bias.expand(config.layer.vocab_size)
        if config.confidence_with_markov:
            stored = dense(tensors["markov_head.markov_w1.weight"]).to(device, backend.dtype)
            self.of_token = (stored.float() @ of_token) + bias

    def __call__(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """``hidden`` [n, B, hidden] after the final norm, ``previous`` int64 [n, B] -> float32 [n,
        B]."""
        return self.scores(hidden, previous).sigmoid()

    def scores(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Before the sigmoid."""
        return (hidden.float() * self.hidden).sum(dim=-1) + self.of_token[previous]


def walk_of(checkpoint: DFlashCheckpoint, network: DFlashNetwork) -> Walk:
    """The head that a checkpoint has."""
    if checkpoint.config.selector is not None:
        return PathSelector(checkpoint, network.backend)
    if checkpoint.config.markov is not None:
        return MarkovChain(checkpoint, network.backend)
    return RowByRow()
