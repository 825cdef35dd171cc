"""The native CPU kernels against their torch twins, and the row invariance that they promise."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.cache import DIGEST_BYTES
from surefoot.errors import SurefootError
from surefoot.kernels.backend import (
    AttentionShape,
    Backend,
    FlatBatch,
    LayerWeights,
    RopeTable,
    Weight,
)
from surefoot.kernels.cpu import build
from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.quant import BYTES_PER_BLOCK, QuantTensor, dense
from surefoot.kernels.torch_backend import TorchBackend

pytestmark = pytest.mark.skipif(
    native_unavailable() is not None, reason=f"native kernels: {native_unavailable()}"
)

QUANT_KINDS = ("Q4_0", "Q4_1", "Q8_0")
POSITIONS = 160


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_weight(kind: str, outputs: int, inputs: int, generator: torch.Generator) -> Weight:
    """``kind``: ``dense`` or a GGUF kind; values of order ``1 / sqrt(inputs)``."""
    if kind == "dense":
        return torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    size = (outputs, inputs // 32, BYTES_PER_BLOCK[kind])
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.int32).to(torch.uint8)
    step = {"Q4_0": 0.2, "Q4_1": 0.2, "Q8_0": 0.013}[kind] / inputs**0.5
    scale = (1 + torch.rand(*size[:2], 1, generator=generator)).mul(step).half()
    blocks[..., 0:2] = scale.view(torch.uint8)
    if kind == "Q4_1":
        blocks[..., 2:4] = (scale.float() * -7.3).half().view(torch.uint8)
    return QuantTensor(kind, blocks.flatten(1).contiguous(), inputs)


def quantized_activations(x: torch.Tensor) -> torch.Tensor:
    """The twin of the kernels' int8 activations: per row and 32 columns, symmetric."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    return ((blocks * inverse).round().double() * (largest / 127.0).double()).flatten(-2)


def exact_linear(
    parts: Sequence[Weight], bias: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """The twin of a packed linear, summed in float64."""
    outputs = [
        quantized_activations(x) @ part.dequantize(torch.float64).T
        if isinstance(part, QuantTensor)
        else x.double() @ part.double().T
        for part in parts
    ]
    return torch.cat(outputs, -1) + (0 if bias is None else bias.double())


class Twin(TorchBackend):
    """What the native kernels compute, in torch: float32 activations, quantised where the weights
    are blocks; dense weights and KV rounded to ``dtype``."""

    def pack_linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Any:
        kept = [p.to(self.dtype).float() if isinstance(p, torch.Tensor) else p for p in parts]
        return lambda x: exact_linear(kept, bias, x).float()

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    return ((found.double() - expected.double()).abs().max() / expected.abs().max()).item()


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's error relative to its norm, ascending."""
    error = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    return error.sort().values


@dataclass(frozen=True)
class Layout:
    """One small decoder layer. ``kinds`` are those of q, k, v, o, gate, up and down."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    kinds: tuple[str, ...] = ("dense",) * 7
    dtype: torch.dtype = torch.float32
    bias: bool = False
    qk_norm: bool = False
    shape: AttentionShape = field(init=False)

    def __post_init__(self) -> None:
        shape = AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)
        object.__setattr__(self, "shape", shape)

    def weights(self, backend: Backend) -> LayerWeights:
        """The same weights on every backend."""
        generator = torch.Generator().manual_seed(7)
        kinds = iter(self.kinds)

        def linear(inputs: int, *outputs: int, sharp: float = 1.0) -> Any:
            parts = [random_weight(next(kinds), n, inputs, generator) for n in outputs]
            bias = torch.randn(sum(outputs), generator=generator) if self.bias else None
            sharpened = [p * sharp if isinstance(p, torch.Tensor) else p for p in parts]
            return backend.pack_linear(sharpened, bias)

        def norm(size: int) -> torch.Tensor:
            return backend.pack_norm(1 + torch.rand(size, generator=generator))

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return LayerWeights(
            qkv=linear(self.hidden, q, kv, kv, sharp=2.0),
            o=linear(q, self.hidden),
            gate_up=linear(self.hidden, self.inner, self.inner),
            down=linear(self.inner, self.hidden),
            input_norm=norm(self.hidden),
            post_norm=norm(self.hidden),
            q_norm=norm(self.head_dim) if self.qk_norm else None,
            k_norm=norm(self.head_dim) if self.qk_norm else None,
            eps=1e-5,
            shape=self.shape,
        )

    def rope(self) -> RopeTable:
        frequencies = 1e4 ** -(torch.arange(self.head_dim // 2) / (self.head_dim // 2))
        angles = torch.arange(POSITIONS)[:, None] * frequencies
        return RopeTable(angles.cos().contiguous(), angles.sin().contiguous())


LAYOUTS = {
    "fp32": Layout(64, 96, 4, 2, 16),
    "fp32 odd, bias, norms": Layout(33, 71, 3, 1, 48, bias=True, qk_norm=True),
    "fp32 heads of 256": Layout(40, 24, 2, 2, 256),
    "bf16": Layout(45, 77, 6, 2, 32, dtype=torch.bfloat16),
    "bf16 group of 10": Layout(48, 50, 20, 2, 16, dtype=torch.bfloat16, bias=True),
    "fp32 group of 60": Layout(32, 32, 60, 1, 16),
    "bf16 3 kv heads": Layout(48, 50, 9, 3, 16, dtype=torch.bfloat16),
    "fp32 8 kv heads": Layout(48, 50, 16, 8, 16),
    "Q4_0": Layout(64, 96, 4, 4, 80, kinds=("Q4_0",) * 7),
    "Q4_1": Layout(64, 96, 6, 2, 64, kinds=("Q4_1",) * 7, dtype=torch.bfloat16),
    "mixed": Layout(
        64, 96, 4, 2, 16, ("Q4_0", "dense", "Q8_0", "Q8_0", "Q4_1", "dense", "Q4_1"), bias=True
    ),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


@dataclass(frozen=True)
class Row:
    """One row of a forward: its request, the index of its key, and what distinguishes a token."""

    slot: int
    key: int
    position: int = -1  # -1: the key's index
    token: int = -1  # -1: the position
    mask: int = -1  # bits of the span's rows; -1: causal

    @property
    def place(self) -> int:
        return self.key if self.position < 0 else self.position


class Runner:
    """Two equal layers (their KV apart) over paged requests, on one backend."""

    def __init__(
        self, layout: Layout, backend: Backend, block_size: int = 16, seed: int = 0
    ) -> None:
        self.layout, self.backend, self.block_size = layout, backend, block_size
        self.weights = layout.weights(backend)
        self.rope = layout.rope()
        pages = -(-POSITIONS // block_size)
        order = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(seed)) + 1
        self.tables = order.view(4, pages).int()
        self.kv = backend.allocate_kv(2, 4 * pages + 1, block_size, layout.shape)

    def input(self, row: Row) -> torch.Tensor:
        token = row.place if row.token < 0 else row.token
        generator = torch.Generator().manual_seed(1000 * max(row.slot, 0) + token)
        return torch.randn(self.layout.hidden, generator=generator)

    def batch(self, rows: Sequence[Row], starts: dict[int, int]) -> FlatBatch:
        masked = any(row.mask != -1 for row in rows)
        return FlatBatch(
            tokens=torch.zeros(len(rows), dtype=torch.int64),
            positions=torch.tensor([row.place for row in rows]),
            key_index=torch.tensor([row.key for row in rows]),
            row_slot=torch.tensor([row.slot for row in rows]),
            block_tables=self.tables,
            span_start=torch.tensor([starts.get(slot, 0) for slot in range(4)]),
            max_keys=max(row.key for row in rows) + 1,
            mask=torch.tensor([row.mask for row in rows]) if masked else None,
        )

    def forward(self, rows: Sequence[Row], starts: dict[int, int] | None = None) -> torch.Tensor:
        """[N, hidden]. ``starts``: the first key of each request's span, else its lowest here."""
        if starts is None:
            starts = {row.slot: row.key for row in sorted(rows, key=lambda row: -row.key)}
        batch = self.batch(rows, starts)
        x = torch.stack([self.input(row) for row in rows])
        for kv in self.kv:
            x = self.backend.layer(self.weights, x, batch, kv, self.rope)
        return x.clone()


def chain(slot: int, first: int, last: int) -> list[Row]:
    return [Row(slot, key) for key in range(first, last)]


def threaded(dtype: torch.dtype = torch.float32, threads: int | None = None) -> NativeBackend:
    """A backend that uses its threads for the smallest work."""
    backend = NativeBackend(dtype, threads=threads)
    backend.serial_below = 0
    return backend


def native(layout: Layout, threads: int = 1, **options: Any) -> Runner:
    backend = NativeBackend(layout.dtype) if threads == 1 else threaded(layout.dtype, threads)
    return Runner(layout, backend, **options)


# --- equivalence with torch ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 21, 40])
@pytest.mark.parametrize("kind", ["dense", *QUANT_KINDS])
def test_a_linear_equals_its_twin(kind: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for dtype in (torch.float32, torch.bfloat16) if kind == "dense" else (torch.float32,):
        # 288 outputs and more than one run of panels; 5 and 99: incomplete panels
        for outputs, inputs in ((288, 64), (99, 96), (5, 32)):
            inputs += 7 if kind == "dense" else 0
            parts = [random_weight(kind, n, inputs, generator) for n in (outputs, 17)]
            if kind == "dense":
                parts = [part.to(dtype) for part in parts if isinstance(part, torch.Tensor)]
            bias = torch.randn(outputs + 17, generator=generator)
            x = torch.randn(rows, inputs, generator=generator)
            backend = NativeBackend(dtype)
            found = backend.linear(backend.pack_linear(parts, bias), x)
            assert difference(found, exact_linear(parts, bias, x)) < 2e-6


def twin(layout: Layout, **options: Any) -> Runner:
    return Runner(layout, Twin("cpu", layout.dtype), **options)


def assert_close(
    layout: Layout, found: torch.Tensor, expected: torch.Tensor, fresh: bool = False
) -> None:
    """Equal to the twin. A value next to a boundary may round to the other int8 or bfloat16, which
    a few later rows then see as keys; on a ``fresh`` cache, rows before that are equal still."""
    errors = row_errors(found, expected)
    if layout.dtype == torch.float32 and set(layout.kinds) == {"dense"}:
        assert errors[-1] < 1e-4
    else:
        assert errors[-1] < 5e-2
        assert not fresh or errors[len(errors) // 10] < 2e-6


SIZES = (8, 4, 32, 24, 5)  # of blocks; one of them with each layout


@pytest.mark.parametrize(
    ("name", "block_size"),
    [(name, 16) for name in LAYOUTS]
    + [(name, SIZES[index % len(SIZES)]) for index, name in enumerate(LAYOUTS)],
)
def test_a_layer_equals_its_twin(name: str, block_size: int) -> None:
    layout = LAYOUTS[name]
    reference, runner = twin(layout, block_size=block_size), native(layout, block_size=block_size)
    rows = chain(0, 0, 37)
    assert_close(layout, runner.forward(rows), reference.forward(rows), fresh=True)
    for rows in (
        [*chain(1, 0, 5), Row(-1, 0), *chain(0, 37, 40), Row(-1, 0)],
        [*chain(0, 40, 41), *chain(1, 5, 6)],
    ):
        real = [index for index, row in enumerate(rows) if row.slot >= 0]
        assert_close(layout, runner.forward(rows)[real], reference.forward(rows)[real])


@each_layout
def test_a_layer_equals_the_torch_backend(name: str) -> None:
    layout = LAYOUTS[name]
    runner = native(layout)
    reference = Runner(layout, TorchBackend("cpu", torch.float32))
    exact = layout.dtype == torch.float32 and set(layout.kinds) == {"dense"}
    rows = [*chain(0, 0, 37), *chain(1, 0, 5)]
    errors = row_errors(runner.forward(rows), reference.forward(rows))
    if exact:
        assert errors[-1] < 1e-4
    else:  # bfloat16 weights or int8 activations
        assert errors[len(errors) // 2] < 0.1


def tree(slot: int, start: int) -> list[Row]:
    """a (b (d), c (e (f))) in the order a b c d e f."""
    parents = [-1, 0, 0, 1, 2, 4]
    rows: list[Row] = []
    for index, parent in enumerate(parents):
        above = rows[parent] if parent >= 0 else Row(slot, start, start - 1, mask=0)
        mask = above.mask | 1 << index
        rows.append(Row(slot, start + index, above.place + 1, 500 + index, mask))
    return rows


@each_layout
def test_a_tree_equals_its_twin(name: str) -> None:
    layout = LAYOUTS[name]
    for start in (0, 13, 32):
        reference, runner = twin(layout), native(layout)
        for each in (reference, runner):
            each.forward(chain(1, 0, start + 3))
            if start:
                each.forward(chain(0, 0, start))
        rows = tree(0, start) + tree(1, start + 3)
        assert_close(layout, runner.forward(rows), reference.forward(rows))


def test_a_tree_of_64_rows_reads_every_bit() -> None:
    layout = LAYOUTS["fp32"]
    reference, runner = twin(layout), native(layout)
    # Row j sees itself and every third row before it; the last row uses the sign bit.
    masks = [sum(1 << i for i in range(j % 3, j + 1, 3)) for j in range(64)]
    signed = [mask - (1 << 64 if mask >> 63 else 0) for mask in masks]
    rows = [Row(0, 20 + j, mask=signed[j]) for j in range(64)]
    for each in (reference, runner):
        each.forward(chain(0, 0, 20))
    assert difference(runner.forward(rows), reference.forward(rows)) < 1e-4


def test_stale_keys_are_never_read() -> None:
    layout = LAYOUTS["bf16"]
    clean, dirty = native(layout), native(layout)
    for kv in dirty.kv:
        kv.data.view(torch.bfloat16).fill_(float("nan"))
    for rows in (chain(0, 0, 3), chain(0, 3, 10), [Row(0, 10, mask=1), Row(0, 11, mask=3)]):
        assert torch.equal(clean.forward(rows), dirty.forward(rows))


def test_padding_rows_write_nothing() -> None:
    runner = native(LAYOUTS["fp32"])
    runner.forward(chain(0, 0, 20))
    before = [kv.data.clone() for kv in runner.kv]
    runner.forward([Row(-1, 3), Row(-1, 0)])
    assert all(torch.equal(kv.data, kept) for kv, kept in zip(runner.kv, before, strict=True))


# --- row invariance: bit for bit ----------------------------------------------------------------


def run_chunks(runner: Runner, chunks: Sequence[Sequence[Row]]) -> dict[tuple[int, int], Any]:
    """The result of every real row by (slot, key)."""
    results = {}
    for rows in chunks:
        for row, value in zip(rows, runner.forward(rows), strict=True):
            if row.slot >= 0:
                results[row.slot, row.key] = value
    return results


def assert_same(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [key for key in found if not torch.equal(found[key], expected[key])]
    assert not wrong, f"{len(wrong)} of {len(found)} rows differ, first {wrong[0]}"


LENGTHS = {0: 53, 1: 21, 2: 6}


def one_by_one() -> list[list[Row]]:
    return [[Row(slot, key)] for slot, length in LENGTHS.items() for key in range(length)]


def shuffled_chunks(seed: int) -> list[list[Row]]:
    """Random chunks of all requests, mixed in random order, with padding rows here and there."""
    rng = random.Random(seed)
    done, chunks = dict.fromkeys(LENGTHS, 0), []
    while any(done[slot] < length for slot, length in LENGTHS.items()):
        spans = []
        for slot in rng.sample(sorted(LENGTHS), rng.randint(1, 3)):
            last = min(done[slot] + rng.choice([1, 2, 3, 5, 8, 13, 40]), LENGTHS[slot])
            spans.append(chain(slot, done[slot], last))
            done[slot] = last
            if rng.random() < 0.3:
                spans.append([Row(-1, 0)] * rng.randint(1, 3))
        rows = [row for span in spans for row in span]
        if any(row.slot >= 0 for row in rows):
            chunks.append(rows)
    return chunks


@each_layout
def test_rows_do_not_depend_on_batch_chunks_pages_or_threads(name: str) -> None:
    layout = LAYOUTS[name]
    plain = run_chunks(native(layout), one_by_one())
    whole = [chain(slot, 0, length) for slot, length in LENGTHS.items()]
    for threads in (1, 2, 3):
        assert_same(run_chunks(native(layout, threads, seed=9), whole), plain)
    for seed, block_size in enumerate((16, 4, 8, 32, 24)):
        runner = native(layout, seed % 2 + 1, block_size=block_size, seed=seed)
        assert_same(run_chunks(runner, shuffled_chunks(seed)), plain)


@each_layout
def test_rows_that_threads_share_are_as_those_that_each_prepares(name: str) -> None:
    """Few rows each thread prepares for itself, of many each prepares some."""
    layout, rows = LAYOUTS[name], chain(0, 0, 150)
    alone = native(layout).forward(rows)
    for threads in (2, 5):
        assert torch.equal(native(layout, threads).forward(rows), alone)
    runner, few = native(layout, 2), [rows[i : i + 5] for i in range(0, 150, 5)]
    assert torch.equal(torch.cat([runner.forward(part) for part in few]), alone)


@pytest.mark.parametrize("name", ["bf16 3 kv heads", "fp32 8 kv heads"])
def test_heads_that_threads_cannot_share_evenly(name: str) -> None:
    """Each thread has some of its own; the rest are cut by rows, for all of them."""
    layout, rows = LAYOUTS[name], chain(0, 0, 60)
    expected = native(layout).forward(rows)
    for threads in (2, 3, 5):
        runner = native(layout, threads)
        assert torch.equal(runner.forward(rows), expected)
        for count in range(1, 20):
            found = runner.forward(rows[60 - count :])
            assert torch.equal(found, expected[60 - count :]), (threads, count)
    # And beside others.
    parts = [[chain(slot, at, at + 5) for slot in range(3)] for at in range(0, 60, 5)]
    together = [[row for part in chunk for row in part] for chunk in parts]
    apart = [part for chunk in parts for part in chunk]
    assert_same(run_chunks(native(layout, 2), together), run_chunks(native(layout), apart))


@each_layout
def test_rows_in_any_order_give_the_same_bits(name: str) -> None:
    rows = [*chain(0, 0, 23), *chain(1, 0, 6), *chain(2, 0, 11)]
    plain = run_chunks(native(LAYOUTS[name]), [rows])
    for seed in range(3):
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert_same(run_chunks(native(LAYOUTS[name], 2), [shuffled]), plain)


@each_layout
def test_a_path_of_a_tree_equals_plain_decoding(name: str) -> None:
    layout, start = LAYOUTS[name], 29
    runner = native(layout)
    runner.forward(chain(0, 0, start))
    found = runner.forward(tree(0, start))
    for path in ([0, 1, 3], [0, 2, 4, 5]):
        alone = native(layout)
        alone.forward(chain(0, 0, start))
        for depth, node in enumerate(path):
            row = Row(0, start + depth, start + depth, 500 + node)
            assert torch.equal(alone.forward([row])[0], found[node])


@pytest.mark.parametrize("kind", ["dense", *QUANT_KINDS])
def test_a_linear_gives_each_row_the_same_bits_in_any_batch(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rng = random.Random(3)
    for dtype in (torch.float32, torch.bfloat16):
        backend = threaded(dtype)
        packed = backend.pack_linear([random_weight(kind, 333, 544, generator)])
        x = torch.randn(40, 544, generator=generator)
        torch.set_num_threads(1)
        alone = torch.cat([backend.linear(packed, row[None]) for row in x])
        for rows in (*range(2, 20), 40):
            torch.set_num_threads(rows % 2 + 1)
            chosen = rng.sample(range(40), rows)
            assert torch.equal(backend.linear(packed, x[chosen]), alone[chosen])


# --- embedding, head, argmax --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", *QUANT_KINDS])
def test_embedding_rows_are_the_dequantized_rows(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = random_weight(kind, 99, 64 if kind != "dense" else 33, generator)
    tokens = torch.tensor([0, 98, 15, 16, 98, 50, 1, 2, 3, 4])
    for dtype in (torch.float32, torch.bfloat16):
        backend = NativeBackend(dtype)
        dense = weight.dequantize() if isinstance(weight, QuantTensor) else weight.to(dtype).float()
        table, head = backend.pack_embedding(weight)
        found = backend.embed(table, tokens)
        # A compiler may fuse neither side's multiply and add: the values are the same.
        assert torch.equal(found, dense[tokens])
        assert table.segments[0].data == head.segments[0].data
        for wrong in (-1, 99):
            with pytest.raises(IndexError, match="vocabulary of 99"):
                backend.embed(table, torch.tensor([3, wrong]))


@pytest.mark.parametrize("kind", ["dense", *QUANT_KINDS])
def test_the_head_equals_its_twin(kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = random_weight(kind, 99, 64, generator)
    backend, norm = NativeBackend(), torch.rand(64, generator=generator)
    head = backend.pack_embedding(weight)[1]
    for rows in (1, 5, 18):
        x = 3 * torch.randn(rows, 64, generator=generator)
        wide = x.double()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.double()
        expected = exact_linear([weight], None, normed.float())
        limit = 1e-5 if kind == "dense" else 2e-3  # a rounding may flip at a boundary
        found = backend.head(norm, 1e-5, head, x)
        assert found.dtype == torch.float32
        assert difference(found, expected) < limit


def argmax_twin(logits: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest value."""
    best = logits.amax(-1, keepdim=True)
    index = torch.arange(logits.shape[1]).expand_as(logits)
    return torch.where(logits == best, index, logits.shape[1]).amin(-1)


@pytest.mark.parametrize("columns", [1, 15, 64, 99, 16384, 16385, 49152, 50001])
def test_argmax_takes_the_lowest_of_the_largest(columns: int) -> None:
    backend = NativeBackend()
    generator = torch.Generator().manual_seed(columns)
    for rows in (1, 3):
        logits = torch.randn(rows, columns, generator=generator)
        assert torch.equal(backend.argmax(logits), argmax_twin(logits))
        ties = torch.randint(-3, 2, (rows, columns), generator=generator).float()
        assert torch.equal(backend.argmax(ties), argmax_twin(ties))
        last = torch.full((rows, columns), float("-inf"))
        assert torch.equal(backend.argmax(last), torch.zeros(rows, dtype=torch.int64))
        last[:, -1] = -1e30
        assert torch.equal(backend.argmax(last), torch.full((rows,), columns - 1))


@pytest.mark.parametrize("kind", ["dense", *QUANT_KINDS])
@pytest.mark.parametrize("threads", [1, 2, 12])
def test_greedy_takes_the_lowest_of_the_largest_logits(kind: str, threads: int) -> None:
    generator = torch.Generator().manual_seed(6)
    backend = NativeBackend(threads=threads)
    backend.serial_below = 0
    norm = torch.ones(64)
    for outputs in (1, 15, 17, 3001, 30000):
        weight = random_weight(kind, max(outputs // 3, 1), 64, generator)
        # Every row stands three times in the matrix, so that every largest logit is a tie.
        parts = [weight] * 3 if outputs > 3 else [weight]
        linear = backend.pack_linear(parts)
        for rows in (1, 8, 21) if outputs < 30000 else (40,):
            x = torch.randn(rows, 64, generator=generator)
            expected = argmax_twin(backend.head(norm, 1e-5, linear, x))
            assert torch.equal(backend.greedy(norm, 1e-5, linear, x), expected)
            assert int(expected.max()) < weight.shape[0]


def test_greedy_of_hopeless_logits_is_the_first() -> None:
    backend = NativeBackend()
    linear = backend.pack_linear([torch.zeros(40, 32)], torch.full((40,), float("-inf")))
    assert backend.greedy(torch.ones(32), 1e-5, linear, torch.ones(3, 32)).tolist() == [0, 0, 0]


# --- the library --------------------------------------------------------------------------------


def test_kv_bytes_are_what_a_block_takes() -> None:
    backend, shape = NativeBackend(torch.bfloat16), AttentionShape(4, 2, 48, 1.0)
    for block_size in (4, 16, 24, 32):
        layers = backend.allocate_kv(3, 10, block_size, shape)
        assert len(layers) == 3
        assert layers[0].data.nbytes == 10 * backend.kv_bytes_per_block(block_size, shape)
    assert backend.kv_bytes_per_block(16, shape) == 2 * 16 * 2 * 48 * 2
    assert backend.kv_bytes_per_block(4, shape) == 2 * 16 * 2 * 48 * 2
    with pytest.raises(ValueError, match="head_dim 40"):
        backend.allocate_kv(1, 1, 16, replace(shape, head_dim=40))


def test_refusals_name_what_is_wrong() -> None:
    with pytest.raises(SurefootError, match=r"dtype: torch\.float16"):
        NativeBackend(torch.float16)
    backend = NativeBackend()
    with pytest.raises(ValueError, match="differ in inputs"):
        backend.pack_linear([torch.zeros(4, 8), torch.zeros(4, 9)])
    with pytest.raises(ValueError, match="7 columns for 8"):
        backend.linear(backend.pack_linear([torch.zeros(4, 8)]), torch.zeros(1, 7))
    layout = LAYOUTS["fp32"]
    runner = native(layout)
    batch = runner.batch([Row(0, 0)], {})
    wrong = replace(batch, block_tables=batch.block_tables.long())
    with pytest.raises(ValueError, match="expected int32"):
        backend.layer(runner.weights, torch.zeros(1, 64), wrong, runner.kv[0], runner.rope)


def test_reasons_for_having_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(**environment: str) -> str | None:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return build._load.__wrapped__()[1]

    cache = str(tmp_path)
    assert reason(SUREFOOT_NATIVE="0") == "switched off by SUREFOOT_NATIVE=0"
    missing = reason(CC="no-such-compiler", SUREFOOT_CACHE=cache)
    assert missing == "no C compiler found (looked for no-such-compiler)"
    broken = reason(SUREFOOT_NATIVE_MARCH="-mno-such-thing", SUREFOOT_CACHE=cache)
    assert broken and "could not compile the native kernels" in broken and "no-such" in broken
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(SurefootError, match=r"^SUREFOOT_CACHE: .* is not a folder; set SUREFOOT"):
        reason(SUREFOOT_CACHE=str(tmp_path / "file"))


LITTLE = '__attribute__((visibility("default"))) int little(void) { return 7; }'


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a little library was compiled instead of the kernels, once per time."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    compiled: list[Path] = []

    def compile_little(command: Sequence[str], library: Path) -> None:
        compiled.append(library)
        (library.parent / "little.c").write_text(LITTLE)
        source = str(library.parent / "little.c")
        build._run_compiler([*command, "-shared", source, "-o", str(library)])

    monkeypatch.setattr(build, "_compile", compile_little)
    return compiled


def test_compiled_kernels_go_to_the_cache(
    tmp_path: Path, compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert build._library().little() == 7
    [entry] = (tmp_path / "native").iterdir()
    assert entry.name == build.current_library()
    assert build._library().little() == 7 and len(compiled) == 1
    assert not any(path.parent.exists() for path in compiled)
    entry.unlink()
    entry.parent.rmdir()
    entry.parent.write_text("not a folder")
    assert build._library().little() == 7 and len(compiled) == 2
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"cannot be kept in {entry.parent} (File exists)" in record.getMessage()
    assert "set SUREFOOT_CACHE to a folder that can be written" in record.getMessage()


@pytest.mark.parametrize("damage", ["empty", "truncated", "hole", "one bit", "no digest"])
def test_damaged_libraries_are_compiled_again(
    damage: str, tmp_path: Path, compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Loading one would end the process (SIGBUS, SIGSEGV) or leave it without kernels."""
    build._library()
    [entry] = (tmp_path / "native").iterdir()
    whole = entry.read_bytes()
    middle = len(whole) // 2
    entry.unlink()  # It is loaded: what was mapped stays as it was.
    entry.write_bytes(
        {
            "empty": b"",
            "truncated": whole[:middle],
            "hole": whole[:2000] + bytes(len(whole) - 4000) + whole[-2000:],
            "one bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "no digest": whole[:-DIGEST_BYTES],
        }[damage]
    )
    assert not build.is_whole(entry)
    assert build._library().little() == 7 and len(compiled) == 2
    assert entry.read_bytes() == whole and build.is_whole(entry)
    [record] = caplog.records
    assert f"{entry} is damaged" in record.getMessage()
    assert build._library().little() == 7 and len(compiled) == 2


def test_a_forked_child_gets_threads_of_its_own() -> None:
    backend = NativeBackend()
    logits = torch.randn(4, 40000)
    expected = backend.argmax(logits)
    child = os.fork()
    if child == 0:
        os._exit(0 if backend.argmax(logits).tolist() == expected.tolist() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_two_callers_at_once_get_the_same_results() -> None:
    backend = NativeBackend()
    logits = torch.randn(8, 40000)
    expected = logits.argmax(dim=1)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: backend.argmax(logits), range(200)))
    assert all(torch.equal(result, expected) for result in results)


def test_two_threads_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def slowly() -> ctypes.CDLL:
        looked.append(time.sleep(0.2))
        return library()

    library = build._library
    monkeypatch.setattr(build, "_library", slowly)
    build._load.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.load_native(), range(2))
    assert first is second is not None
    assert len(looked) == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_largest_sums_of_a_block(kind: str, rows: int) -> None:
    """All weights and all inputs at the ends of their ranges: the products of a block are as large
    as they can be."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    half = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    for value in (0, 127, 128, 255) if kind == "Q8_0" else (0, 255):
        blocks = torch.full((33, 2, size), value, dtype=torch.uint8)
        blocks[:, :, :2] = half
        if kind == "Q4_1":
            blocks[:, :, 2:4] = half
        weight = QuantTensor(kind, blocks.flatten(1), 64)
        linear = NativeBackend(torch.float32).pack_linear([weight])
        for sign in (1.0, -1.0):
            x = torch.full((rows, 64), 127.0 * sign)
            x[:, 1::2] *= 1 if rows % 2 else -1
            expected = x @ dense(weight).t()
            assert torch.equal(NativeBackend(torch.float32).linear(linear, x), expected)
