"""Random forwards of which only the sampled rows' outputs are wanted, against all of them."""

from __future__ import annotations

import random
from typing import Any

import torch

from surefoot.kernels.backend import Backend, FlatBatch, LayerWeights, RopeTable
from surefoot.kernels.batch import SpanTable
from surefoot.kernels.cpu.kv import NativeKV
from surefoot.kernels.rounds import RoundLayout, RoundSpans, sampled_rows


def random_spans(seed: int, tables: torch.Tensor, most_keys: int) -> tuple[FlatBatch, RoundSpans]:
    """Prompt chunks that end and that go on, chains of drafts, unused entries and padding rows, in
    requests of up to ``most_keys`` keys, on the device of ``tables`` int32 [slots, blocks]."""
    draw, entries, start, rows = random.Random(seed), [], {}, []
    for slot in draw.sample(range(len(tables)), min(len(tables), 3)):
        known, drafts = draw.choice([(1, 0), (1, 3), (draw.randint(2, most_keys // 3), 0)])
        samples = draw.random() < 0.6 if known > 1 else 1
        start[slot] = draw.randint(0, most_keys - known - drafts)
        entries.append((slot, known, drafts, int(samples)))
        rows += [(slot, start[slot] + place) for place in range(known + drafts)]
        if draw.random() < 0.3:
            entries.append((0, 0, 0, 0))
    rows += [(-1, 0)] * draw.randint(0, 4)
    counts = torch.tensor([known + drafts for _, known, drafts, _ in entries])
    slots, known, drafts, samples = (column.contiguous() for column in torch.tensor(entries).T)
    device, firsts = tables.device, counts.cumsum(0) - counts
    keys = torch.tensor([key for _, key in rows], device=device)
    batch = FlatBatch(
        tokens=torch.zeros_like(keys),
        positions=keys,
        key_index=keys,
        row_slot=torch.tensor([slot for slot, _ in rows], device=device),
        block_tables=tables,
        span_start=torch.tensor([start.get(slot, 0) for slot in range(len(tables))], device=device),
        max_keys=most_keys,
        spans=SpanTable(firsts.to(device), counts.to(device), slots.to(device), len(rows)),
    )
    return batch, RoundSpans(*(x.to(device) for x in (slots, known, drafts, samples)))


def lay_out(batch: FlatBatch, spans: RoundSpans, padding: int) -> RoundLayout:
    """``padding``: sampled rows that there is room for beyond those that there are."""
    assert batch.spans is not None
    index, first = [], []
    for row, known, drafts, samples in zip(
        batch.spans.first_row.tolist(),
        spans.known.tolist(),
        spans.drafts.tolist(),
        spans.samples.tolist(),
        strict=True,
    ):
        first.append(len(index))
        if known and samples:
            index += range(row + known - 1, row + known + drafts)
    index += index[-1:] * padding
    places = torch.tensor(index, dtype=torch.int64, device=batch.tokens.device)
    return RoundLayout(
        batch=batch,
        first_row=batch.spans.first_row,
        sample_index=places,
        sample_slots=batch.row_slot[places],
        sample_positions=batch.positions[places] + 1,
        first_sample=torch.tensor(first, device=batch.tokens.device),
    )


def check_output_rows(
    backend: Backend,
    weights: LayerWeights,
    kv: list[Any],
    rope: RopeTable,
    tables: torch.Tensor,
    most_keys: int,
    hidden: int,
    seed: int,
    tolerance: float = 0.0,
) -> None:
    """Outputs of the sampled rows, features and all keys and values are those of a forward whose
    rows are all wanted. ``kv``: of as many layers as are run."""

    def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.allclose(found, expected, rtol=0, atol=tolerance)

    batch, spans = random_spans(seed, tables, most_keys)
    padding = seed % 3
    layout = lay_out(batch, spans, padding)
    torch.manual_seed(seed)
    x = torch.randn(len(batch.tokens), hidden).to(tables.device, backend.dtype)
    outputs = sampled_rows(spans, layout, 4)
    for capture in ([1], [len(kv), 0]):
        caches = [_copies(kv), _copies(kv)]
        blocks = [weights] * len(kv)
        whole, kept = backend.layers(blocks, x.clone(), batch, caches[0], rope, capture)
        some, features = backend.layers(blocks, x.clone(), batch, caches[1], rope, capture, outputs)
        kept_rows = len(outputs.index) - padding
        assert same(some[:kept_rows], whole[outputs.index][:kept_rows])
        used = batch.row_slot >= 0
        assert features.shape[1] == hidden * len(capture)
        assert same(features[used], kept[used])
        for left, right in zip(*caches, strict=True):
            left, right = getattr(left, "data", left), getattr(right, "data", right)
            assert same(left, right)


def _copies(kv: list[Any]) -> list[Any]:
    return [
        x.clone()
        if isinstance(x, torch.Tensor)
        else NativeKV(x.data.clone(), x.block_size, x.shape)
        for x in kv
    ]
