"""A checkpoint's tensors, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import QuantTensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor still in its file: its logical shape, and how to get it."""

    shape: tuple[int, ...]
    load: Callable[[], Weight]


class LazyWeights(Mapping[str, Weight]):
    """Tensors by Hugging Face name. Each look-up reads (maps, converts) the tensor anew, so that
    what a caller lets go of is freed; ``shape_of`` reads nothing."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Weight:
        return self._tensors[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The tensor's logical shape, without loading it."""
        return self._tensors[name].shape


def finite(weight: Weight, name: str, path: Path) -> Weight:
    """``weight``, which the file at ``path`` calls ``name``. Raises SurefootError when it holds NaN
    or infinite values, which would make every logit NaN. Reads it once (of blocks their scales)."""
    values = weight.scales if isinstance(weight, QuantTensor) else weight
    # NaN is the smallest and the largest of any values that hold one.
    if values.numel() and not torch.stack(values.aminmax()).isfinite().all():
        as_type = f" as {str(weight.dtype)[6:]}" if isinstance(weight, torch.Tensor) else ""
        raise SurefootError(
            "model",
            f"{name} in {path} holds NaN or infinite values{as_type}",
            "download the model again, or use another copy of it",
        )
    return weight
