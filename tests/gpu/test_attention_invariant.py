"""A row's attention is a function of its own text, to the bit, for every shape: compiled, on fresh
random numbers, in random company, through whichever kernels a forward would choose."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_prompt_attention import exact
from test_real_shapes import relative

from surefoot.kernels.backend import AttentionShape
from surefoot.kernels.triton.attend import attend, work_of
from surefoot.kernels.triton.attention import span_attention
from test_triton_attention import Text, grown, lay_out, path_of

pytestmark = pytest.mark.gpu
bf16, fp32 = torch.bfloat16, torch.float32
LENGTHS = (300, 1200)
CASES = [(bf16, group, width) for group in (1, 3, 4, 5, 8) for width in (64, 80, 96, 128)]
CASES += [(fp32, 1, 128), (fp32, 3, 64), (fp32, 4, 128), (fp32, 5, 80), (fp32, 8, 96)]
TOLERANCE = {bf16: 6e-3, fp32: 1e-5}


@pytest.fixture(autouse=True)
def _fresh_numbers() -> Iterator[None]:
    """New numbers in every run, printed when a test fails."""
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    random.seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


def attended(
    texts: Sequence[Text],
    spans: Sequence[tuple[int, int]],
    shape: AttentionShape,
    block_size: int = 16,
    trees: Mapping[int, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """What the rows of each span get; ``trees``: the masks of those that are trees."""
    masks = None
    if trees:
        masks = [torch.full((count,), -1) for _, count in spans]
        for index, mask in trees.items():
            masks[index] = mask
    most = max(first + count for first, count in spans) + random.choice([0, 0, 700])
    padding, table = random.choice([0, 1, 9]), random.random() < 0.8
    q, kv, batch = lay_out(texts, spans, block_size, most, padding, masks, table)
    counts = [count for _, count in spans]
    if trees:
        widest = max(len(mask) for mask in trees.values())
        batch = replace(batch, tree_rows=random.choice([widest, 64]))
    found = attend(q, kv, batch, shape, work_of(batch, shape, kv))
    return list(found[: sum(counts)].split(counts))


@pytest.mark.parametrize(("dtype", "group", "width"), CASES, ids=str)
def test_company_cuts_prefixes_and_padding_change_no_bit(
    dtype: torch.dtype, group: int, width: int
) -> None:
    kv_heads = random.choice([1, 2, 3])
    shape = AttentionShape(kv_heads * group, kv_heads, width, width**-0.5)
    length = random.choice(LENGTHS) + random.randint(0, 99)
    own, other = Text(length, shape, dtype), Text(length, shape, dtype)
    q, kv, batch = lay_out([own], [(0, length)], 16, length)
    whole = attend(q, kv, batch, shape, work_of(batch, shape, kv))
    assert relative(whole, exact(q, kv, batch, shape)) < TOLERANCE[dtype]
    # Alone, as a decoding request is; then anyhow.
    trials = [([], (length - 1, 1)), ([(length - 9, 1)] * 40, (length - 2, 2))]
    for _ in range(6):
        company = []
        for _ in range(random.choice([0, 3, 3, 40])):
            rows = random.choice([1, 1, 4, 6, 30, 150])
            company.append((random.randrange(length - rows), rows))
        rows = min(length, random.choice([1, 3, 17, 64, 65, 250]))
        trials.append((company, (random.randint(0, length - rows), rows)))
    for number, (company, (first, rows)) in enumerate(trials):
        place = random.randint(0, len(company))
        spans = [*company[:place], (first, rows), *company[place:]]
        texts = [own if index == place else other for index in range(len(spans))]
        trees = {
            index: grown(random.Random(), count)
            for index, (_, count) in enumerate(spans)
            if index != place and count == 6 and number % 2
        }
        block_size = random.choice([16, 16, 64])
        found = attended(texts, spans, shape, block_size, trees)[place]
        expected = whole[first : first + rows]
        assert torch.equal(found, expected), (spans, place, (found != expected).float().mean())


@pytest.mark.parametrize(("room", "block_size"), [(0, 16), (30, 256), (2048, 8), (2048, 64)])
@pytest.mark.parametrize(
    ("dtype", "group", "width"),
    [
        *((bf16, 1, 128), (bf16, 3, 64), (bf16, 4, 128), (bf16, 7, 64)),
        *((bf16, 8, 80), (fp32, 3, 64), (fp32, 4, 128)),
    ],
    ids=str,
)
def test_a_tree_s_nodes_have_the_bits_of_chains(
    dtype: torch.dtype,
    group: int,
    width: int,
    room: int,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the tree begins in a block and in a chunk of keys, however large it is, alone and
    beside chains, prompts and other trees, with room for partial results and without."""
    monkeypatch.setattr("surefoot.kernels.triton.chunk_list.MOST_PARTS", room)
    kv_heads = random.choice([1, 2, 3])
    shape = AttentionShape(kv_heads * group, kv_heads, width, width**-0.5)
    own, other = Text(1400, shape, dtype), Text(1400, shape, dtype)
    places = (0, 250, random.randint(1, 1300), 256 * random.randint(1, 5) - 3)
    for first in random.sample(places, 2):
        nodes = random.choice([2, 6, 17, 17, 33, 64])
        mask = grown(random.Random(), nodes)
        paths = [path_of(own, first, bits) for bits in mask.tolist()]
        chains = attended(paths, [(len(path.q) - 1, 1) for path in paths], shape, block_size)
        expected = torch.cat(chains)
        q, kv, batch = lay_out([own], [(first, nodes)], 16, first + nodes, masks=[mask])
        assert relative(expected, exact(q, kv, batch, shape)) < TOLERANCE[dtype]
        for count in (0, 3, 40):
            rows = [random.choice([1, 6, 17, 700 if count == 3 else 30]) for _ in range(count)]
            company = [(random.randrange(1400 - n), n) for n in rows]
            place = random.randint(0, count)
            spans = [*company[:place], (first, nodes), *company[place:]]
            trees = {
                index: grown(random.Random(), n)
                for index, (_, n) in enumerate(spans)
                if n in (6, 17) and random.random() < 0.7
            }
            trees[place] = mask
            texts = [own if index == place else other for index in range(len(spans))]
            found = attended(texts, spans, shape, block_size, trees)[place]
            assert torch.equal(found, expected), (spans, place, block_size, mask.tolist())


@pytest.mark.parametrize(("dtype", "width"), [(bf16, 80), (bf16, 128), (fp32, 64)])
def test_recorded_once_for_all_lengths(dtype: torch.dtype, width: int) -> None:
    """A graph of ``span_attention`` for so many spans gives what eager calls give, however long
    their texts are."""
    shape = AttentionShape(6, 2, width, width**-0.5)
    texts = [Text(3100, shape, dtype) for _ in range(3)]

    def draw() -> list[tuple[int, int]]:
        return [(random.choice([0, 40, 900, 3000]) + random.randint(0, 90), 4) for _ in texts]

    q, kv, batch = lay_out(texts, [(3096, 4)] * 3, 16, 3100)

    def run() -> torch.Tensor:
        return span_attention(q, kv, batch, shape)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(4):
        spans = draw()
        other = lay_out(texts, spans, 16, 3100)
        q.copy_(other[0])
        kv.copy_(other[1])
        for name in ("key_index", "span_start", "block_tables"):
            getattr(batch, name).copy_(getattr(other[2], name))
        graph.replay()
        assert torch.equal(captured, run()), spans
        assert relative(captured, exact(q, kv, batch, shape)) < TOLERANCE[dtype]
