"""The contract of a proposer that works on the host, for requests with a grammar.

Such a request joins a round when the report of its last one has been read, since the host writes
the masks of its rows. Then all of its text is known there, and whoever drafts on the host keeps
nobody waiting. As with any other proposer, a wrong offer costs time, never text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from surefoot.request import Request


@dataclass(frozen=True)
class HostDrafts:
    """An offer for one request. The engine cuts it before the first draft that the request's
    grammar forbids."""

    tokens: Sequence[int] = ()
    confidence: Sequence[float] = ()
    """As many, in 0..1: the proposer's own idea of a draft's chance, if those before it are right,
    which is calibrated against what happens."""


class HostProposer(ABC):
    """Base class. ``Options`` is a frozen dataclass with the proposer's settings."""

    name: ClassVar[str]
    Options: ClassVar[type]

    has_raised = False
    """Whether ``propose`` ever raised an exception."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @classmethod
    def draft_tokens(cls, options: Any) -> int | None:
        """Most drafts that it offers at once with these options; None: as many as there may be."""
        return getattr(options, "draft_tokens", None)

    @abstractmethod
    def propose(self, request: Request, most: int) -> HostDrafts:
        """Offer up to ``most`` drafts that follow the text of ``request``, whose ``grammar`` stands
        behind that text. A round waits for it: microseconds."""
