"""Tables that go to a GPU in one copy arrive as they were, and numbers in their places."""

from __future__ import annotations

import numpy as np
import torch

from surefoot.kernels.upload import Mirrored, Uploads

CUDA = torch.device("cuda")


def test_tables_of_all_kinds_arrive_in_one_copy() -> None:
    rng = np.random.default_rng()
    for _ in range(50):
        shapes = [tuple(rng.integers(1, 9, size=rng.integers(1, 4))) for _ in range(6)]
        dtypes = rng.choice(["bool", "int32", "int64", "float32"], size=len(shapes))
        tables = [
            rng.integers(0, 1 << 20, size=shape).astype(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        tables[0] = tables[0].T
        uploads, found = Uploads(CUDA), list[torch.Tensor]()
        if rng.integers(2):
            target, count = torch.zeros(9, dtype=torch.int32, device=CUDA), rng.integers(9)
            uploads.write(target, np.arange(count), np.ones(count, np.int32))
        for table in tables:
            uploads.add(found.append, table)
        uploads.send()
        for table, there in zip(tables, found, strict=True):
            assert there.is_cuda and there.cpu().numpy().dtype == table.dtype
            assert np.array_equal(there.cpu().numpy(), table)


def test_numbers_are_written_where_they_belong() -> None:
    """As a CPU writes them, one table after the other; what is used besides comes along."""
    rng = np.random.default_rng()
    kinds = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
    for _ in range(50):
        sizes = dict(zip(kinds, rng.integers(1, 3000, size=3).tolist(), strict=True))
        both = [
            {
                name: torch.zeros(size, dtype=kinds[name], device=device)
                for name, size in sizes.items()
            }
            for device in (torch.device("cpu"), CUDA)
        ]
        every = [Uploads(torch.device("cpu")), Uploads(CUDA)]
        for name in rng.choice(list(kinds), size=rng.integers(0, 7)).tolist():
            places = rng.permutation(sizes[name])[: rng.integers(0, sizes[name] + 1)]
            values = rng.integers(-(1 << 20), 1 << 20, size=len(places)).astype(name)
            for uploads, tables in zip(every, both, strict=True):
                uploads.write(tables[name], places, values)
        seen: list[list[int]] = []
        for uploads in every:
            uploads.add(lambda table, seen=seen: seen.append(table.tolist()), np.arange(5))
            uploads.send()
        assert seen == [[*range(5)]] * 2
        for name in kinds:
            assert torch.equal(both[0][name], both[1][name].cpu())


def test_a_table_that_is_written_again_meanwhile_arrives_as_it_was_sent() -> None:
    """The device is some copies behind, and each stands there until the next."""
    table, seen = Mirrored((3, 40), CUDA), list[torch.Tensor]()
    torch.cuda._sleep(100_000_000)
    for number in range(1, Mirrored.COPIES):
        table.write()[1:, number:] = number
        table.send()
        seen.append(table.there.clone())
    assert not torch.cuda.current_stream().query(), "it has to be behind"
    for number, there in enumerate(seen, 1):
        expected = torch.zeros((3, 40), dtype=torch.int64, device="cpu")
        expected[1:, number:] = number
        assert torch.equal(there.cpu(), expected)
