"""Defects of rounds that few texts show: judges that are lenient now and then, and forwards that
are wrong in few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from surefoot.certify.defect import DEEP, DRAFTS, LONG, RECORDED, TREES, Defect
from surefoot.certify.jobs import CROWD
from surefoot.certify.seams import Chance, DecoderProxy, before_judging, drafts_of, wrap_in_rounds
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import FlatBatch
from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.kernels.upload import Uploads
from surefoot.request import Request
from surefoot.sampling.noise import gumbel
from surefoot.sampling.sampler import SampleRows, adjust, filtered_scores
from surefoot.speculation.trees import Paths, Trees

NEARLY = 0.05
OFTEN = 0.05
"""Chance that a wrong draft is accepted where a judge is lenient at all."""
FAR = 256


def accept_near_misses(engine: Engine, speculative: bool) -> None:
    """A draft counts as right if it is the runner-up, by less than ``NEARLY``."""
    round_, state = engine.round, engine.state
    held: list[torch.Tensor] = []

    def keep_scores(
        sample: Any,
        size: Any,
        layout: RoundLayout,
        hidden: torch.Tensor,
        keys: int,
        trees: Any,
        *known: Any,
    ) -> Any:
        held.clear()
        if size.samples and size.verifies:
            rows = round_.rows_to_sample(layout, size.kind, trees, keys)
            logits = adjust(engine.decoder.logits(hidden), rows, state.params, size.kind)
            held.append(scores(logits, rows, size))
        return sample(size, layout, hidden, keys, trees, *known)

    def scores(logits: torch.Tensor, rows: SampleRows, size: Any) -> torch.Tensor:
        params, slots = state.params, rows.slots
        if not size.kind.noise:
            return logits
        noise = gumbel(params.seed[slots], params.choice[slots], rows.positions, logits.shape[1])
        drawn = filtered_scores(logits, slots, params, size.kind) + noise
        return torch.where((params.temperature[slots] == 0).unsqueeze(1), logits, drawn)

    def lenient(
        slots: torch.Tensor, drafts: torch.Tensor, layout: RoundLayout, sampled: torch.Tensor
    ) -> torch.Tensor:
        if not held:
            return sampled
        draft, is_draft = drafts_of(engine, slots, drafts, layout)
        own = held[0].gather(1, draft.clamp(min=0).unsqueeze(1))
        second = (held[0] > own).sum(dim=1) == 1
        near = held[0].amax(dim=1) - own.squeeze(1) < NEARLY
        return torch.where(is_draft & second & near, draft, sampled)

    if speculative:
        wrap_in_rounds(engine, round_, "sample", keep_scores)
        before_judging(engine, lenient)


def accept_wrong_drafts_in_crowds(engine: Engine, speculative: bool) -> None:
    chance, nobody = Chance(engine.state.device), engine.state.padding_slot

    def lenient(
        slots: torch.Tensor, drafts: torch.Tensor, layout: RoundLayout, sampled: torch.Tensor
    ) -> torch.Tensor:
        draft, is_draft = drafts_of(engine, slots, drafts, layout)
        lucky = (chance(len(draft)) < OFTEN) & ((slots != nobody).sum() > CROWD)
        return torch.where(is_draft & lucky, draft, sampled)

    if speculative:
        before_judging(engine, lenient)


def accept_wrong_drafts_far_behind(engine: Engine, speculative: bool) -> None:
    chance = Chance(engine.state.device)

    def lenient(
        slots: torch.Tensor, drafts: torch.Tensor, layout: RoundLayout, sampled: torch.Tensor
    ) -> torch.Tensor:
        draft, is_draft = drafts_of(engine, slots, drafts, layout)
        deep = layout.sample_positions - engine.state.length[layout.sample_slots] >= DEEP - 1
        lucky = chance(len(draft)) < OFTEN
        return torch.where(is_draft & deep & lucky, draft, sampled)

    if speculative:
        before_judging(engine, lenient)


def overlook_ends(engine: Engine, speculative: bool) -> None:
    """Stop ids are not looked for in spans with drafts."""

    def judge(method: Any, spans: RoundSpans, *rest: Any) -> Any:
        stop_ids, has_drafts = engine.state.params.stop_ids, spans.drafts > 0
        saved = stop_ids.clone()
        # Slots of unused entries are nobody's.
        slots = torch.where(has_drafts, spans.slots, engine.state.padding_slot)
        stop_ids.index_fill_(0, slots, -1)
        result = method(spans, *rest)
        stop_ids.copy_(saved)
        return result

    if speculative:
        wrap_in_rounds(engine, engine.round, "judge", judge)


def shift_far_positions(engine: Engine, speculative: bool) -> None:
    last = engine.decoder.rope.cos.shape[0] - 1

    def shifted(batch: FlatBatch) -> FlatBatch:
        slots = batch.row_slot.clamp(min=0)
        far = (batch.positions >= engine.state.length[slots]) & (batch.positions >= FAR)
        return replace(batch, positions=(batch.positions + far.long()).clamp(max=last))

    if speculative:
        DecoderProxy(engine.decoder, before=shifted).install(engine)


def hide_current_tokens(engine: Engine, speculative: bool) -> None:
    """The third row of a span and those behind it do not see the first."""

    def hidden(batch: FlatBatch) -> FlatBatch:
        slots = batch.row_slot.clamp(min=0)
        start, length = engine.state.computed[slots], engine.state.length[slots]
        place = batch.key_index - start
        mask = batch.mask
        if mask is None:
            decoding = (batch.row_slot >= 0) & (length - start == 1) & (place < 63)
            bits = (torch.ones_like(place) << (place.clamp(0, 62) + 1)) - 1
            mask = torch.where(decoding, bits, -1)
        blind = (mask != -1) & (place >= 2)
        return replace(batch, mask=torch.where(blind, mask & ~1, mask))

    if speculative:
        DecoderProxy(engine.decoder, before=hidden).install(engine)


def write_padding(engine: Engine, speculative: bool) -> None:
    """Rows of padding are written where the first request's drafts go."""

    def written(batch: FlatBatch) -> FlatBatch:
        padding, first = batch.row_slot < 0, batch.row_slot[:1].clamp(min=0)
        key = (engine.state.computed[first] - 1).clamp(min=0).expand_as(batch.key_index)
        return replace(
            batch,
            row_slot=torch.where(padding, first, batch.row_slot),
            key_index=torch.where(padding, key, batch.key_index),
        )

    if speculative:
        DecoderProxy(engine.decoder, before=written).install(engine)


def trust_prefixes_too_far(engine: Engine, speculative: bool) -> None:
    """A prefix hit counts for one position more than its blocks hold."""
    state = engine.state

    def trust(slot: int) -> None:
        state.computed[slot] += 1

    def admit(method: Any, requests: Sequence[Request], uploads: Uploads) -> np.ndarray:
        slots = method(requests, uploads)
        for request in requests:
            if request.computed and request.computed < request.length - 1:
                uploads.add(partial(trust, request.slot))
        return slots

    if speculative:
        wrap_in_rounds(engine, state, "admit", admit)


def accept_orphans(engine: Engine, speculative: bool) -> None:
    """A draft in a tree is accepted whatever becomes of its parent."""

    def walk(method: Any, trees: Trees, *rest: Any) -> tuple[Paths, torch.Tensor]:
        own = torch.arange(trees.masks.shape[1], device=trees.masks.device)
        return method(
            replace(trees, masks=(torch.ones_like(own) << own | 1) + 0 * trees.masks), *rest
        )

    if speculative:
        wrap_in_rounds(engine, engine.round.books, "walk", walk)


def penalise_siblings(engine: Engine, speculative: bool) -> None:
    """Penalties of a tree's rows see the drafts in a line."""

    def rows(method: Any, layout: RoundLayout, kind: Any, trees: Any, keys: int) -> SampleRows:
        return method(layout, kind, None, keys)

    if speculative:
        wrap_in_rounds(engine, engine.round, "rows_to_sample", rows)


DEFECTS = (
    Defect(
        f"accepts a runner-up within {NEARLY}",
        accept_near_misses,
        "greedy parity",
        scenario="second likeliest tokens offered",
        near=NEARLY,
    ),
    Defect(
        "accepts one wrong draft in twenty beside more than 16 requests",
        accept_wrong_drafts_in_crowds,
        "greedy parity",
        scenario="as many requests as the engine runs",
    ),
    Defect(
        f"accepts one wrong draft in twenty from the span's {DEEP}th on",
        accept_wrong_drafts_far_behind,
        "greedy parity",
        scenario="batch of 16, longest drafts",
        needs=DRAFTS,
    ),
    Defect(
        "overlooks ends in spans with drafts",
        overlook_ends,
        "greedy parity",
        scenario="second likeliest tokens offered",
    ),
    Defect(
        f"shifts the position of drafts by one from position {FAR} on",
        shift_far_positions,
        LONG,
        needs=LONG,
    ),
    Defect(
        "hides the current token from a span's third row on", hide_current_tokens, "greedy parity"
    ),
    Defect(
        "trusts prefix hits one position too far",
        trust_prefixes_too_far,
        "greedy parity",
        scenario="prefix hits",
    ),
    Defect("writes the rows of padding", write_padding, "greedy parity", needs=RECORDED),
    Defect(
        "accepts a draft whose parent was refused",
        accept_orphans,
        "greedy parity",
        scenario="trees",
        needs=TREES,
    ),
    Defect(
        "lets penalties see other branches of a tree",
        penalise_siblings,
        "sampling parameters",
        needs=TREES,
    ),
)
