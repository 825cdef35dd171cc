"""One broken line, and the tests that have to notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``old`` stands exactly once in ``file``, a path below ``src/surefoot``, and becomes ``new``.
    ``tests``: arguments of pytest below ``tests/cpu``, files or single tests of them, at least one
    of which then has to fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """From the root of the repository."""
        return f"src/surefoot/{self.file}"

    def __str__(self) -> str:
        return f"{self.file}: {_short(self.old)}  ->  {_short(self.new)}"


def mutation(file: str, old: str, new: str, *tests: str) -> Mutation:
    """As ``Mutation``, with less punctuation."""
    return Mutation(file, old, new, tests)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:57] + "..."
