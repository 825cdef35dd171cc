"""A checkpoint's tensors, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from surefoot.kernels.backend import Weight


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
