"""Tables that go to a GPU in one copy arrive as they were."""

from __future__ import annotations

import numpy as np
import torch

from surefoot.kernels.upload import upload_together


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
        found = upload_together(tables, torch.device("cuda"))
        for table, there in zip(tables, found, strict=True):
            assert there.is_cuda and there.cpu().numpy().dtype == table.dtype
            assert np.array_equal(there.cpu().numpy(), table)
