"""Numbers that go to a device are in their places, whatever else goes with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.triton.writes import write_all
from surefoot.kernels.upload import Mirrored, Uploads, Write, addressed, places_of
from triton_interpreter import DEVICE

KINDS = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


@st.composite
def many_writes(draw: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Of three tables, which one, places and values; again and again of the same ones."""
    found = []
    for _ in range(draw(st.integers(0, 6))):
        which = draw(st.integers(0, 2))
        places = draw(st.lists(st.integers(0, 11), unique=True, max_size=12))
        values = draw(st.lists(st.integers(-9, 9), min_size=len(places), max_size=len(places)))
        kind = list(KINDS.values())[which]
        found.append((which, np.array(places, dtype=np.int64), np.array(values, dtype=kind)))
    return found


def tables(device: torch.device) -> list[torch.Tensor]:
    return [torch.arange(12, device=device).to(kind).view(3, 4) for kind in KINDS]


def expected(writes: list[tuple[int, np.ndarray, np.ndarray]]) -> list[list[float]]:
    found = [[float(value) for value in range(12)] for _ in KINDS]
    for which, places, values in writes:
        for place, value in zip(places.tolist(), values.tolist(), strict=True):
            found[which][place] = value
    return found


@settings(max_examples=60)
@given(many_writes())
def test_the_last_one_who_writes_stays(
    writes: list[tuple[int, np.ndarray, np.ndarray]],
) -> None:
    device = torch.device("cpu")
    targets, uploads = tables(device), Uploads(device)
    for which, places, values in writes:
        uploads.write(targets[which], places, values)
    seen: list[Any] = []
    uploads.add(lambda table: seen.append((table.tolist(), targets[0].tolist())), np.arange(3))
    uploads.send()
    assert [target.view(-1).tolist() for target in targets] == expected(writes)
    # Who uses a table finds all written.
    assert seen == [([0, 1, 2], targets[0].tolist())] and not uploads.waiting


@pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same check compiled")
@settings(max_examples=25)
@given(many_writes())
def test_one_kernel_writes_the_same(
    writes: list[tuple[int, np.ndarray, np.ndarray]],
) -> None:
    targets = tables(DEVICE)
    sides = []
    for wide in (True, False):
        side = [Write(targets[at], *rest) for at, *rest in writes if (at == 0) == wide]
        sides.append(addressed(side))
    buffer = b"".join(part.tobytes() for side in sides for part in side)
    counts = [len(addresses) for addresses, _ in sides]
    assert counts == [len(set(addresses.tolist())) for addresses, _ in sides]
    write_all(torch.frombuffer(bytearray(buffer + bytes(8)), dtype=torch.uint8), *counts)
    assert [target.view(-1).tolist() for target in targets] == expected(writes)


@pytest.mark.parametrize(
    ("target", "values"), [(torch.bool, "bool"), (torch.int64, "int32"), (torch.float32, "int32")]
)
def test_numbers_of_another_kind_are_refused(target: torch.dtype, values: str) -> None:
    """Before anything is sent: a kernel would write what they are not."""
    uploads = Uploads(torch.device("cpu"))
    with pytest.raises(TypeError, match=values):
        uploads.write(torch.zeros(4, dtype=target), np.arange(4), np.zeros(4, dtype=values))
    assert not uploads.waiting


@pytest.mark.parametrize("values", [2, 5])
def test_other_numbers_of_values_than_of_places_are_refused(values: int) -> None:
    """A kernel would take values for addresses."""
    uploads = Uploads(torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{values} values for 4 places"):
        uploads.write(torch.zeros(9), np.arange(4), np.zeros(values, dtype=np.float32))
    assert not uploads.waiting


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_places_of_a_table(shape: list[int], data: Any) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = data.draw(st.lists(st.integers(0, shape[dim] - 1), unique=True, max_size=4))
    table = np.arange(np.prod(shape)).reshape(shape)
    found = places_of(np.array(index, dtype=np.int64), shape, dim)
    assert found.reshape(-1).tolist() == table.take(index, axis=dim).reshape(-1).tolist()


def test_a_table_is_written_as_a_whole_again_and_again() -> None:
    """What was there before is gone, also when all that it is written down in had their turn."""
    table = Mirrored((2, 5), torch.device("cpu"))
    for number in range(2 * Mirrored.COPIES):
        table.write()[1, number % 5] = number
        table.send()
        expected = torch.zeros((2, 5), dtype=torch.int64)
        expected[1, number % 5] = number
        assert torch.equal(table.there, expected)
