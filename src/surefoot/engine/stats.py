"""What an engine did since its start, as plain counters (a server exports them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from surefoot.engine.landing import Landing
    from surefoot.engine.loop import Loop
    from surefoot.request import Drafting, Request


class Progress(NamedTuple):
    """What a round gave one request: its new tokens, already part of ``request.output``."""

    request: Request
    tokens: Sequence[int]
    drafting: Drafting


@dataclass
class EngineStats:
    """``rows`` are those of the target's forward passes, drafts and padding included;
    ``prefix_queries`` and ``prefix_hits`` count tokens of prompts, each once; ``without_drafters``
    requests that were let in without drafters that they allow, again after a preemption."""

    rounds: int = 0
    replays: int = 0
    """Of the rounds, those that were recorded (on a GPU), or of a recorded size."""
    rows: int = 0
    draft_rows: int = 0
    preemptions: int = 0
    without_drafters: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kinds: dict[str, tuple[int, float]] = field(default_factory=dict)
    """(Rounds, seconds on the device) of rounds with prompt chunks and without, with drafts and
    without."""

    def count_admissions(self, loop: Loop) -> None:
        """Requests were let in, or sent back to the queue."""
        for prompt, cached in loop.admitted:
            self.prefix_queries += prompt
            self.prefix_hits += cached
        loop.admitted.clear()
        self.preemptions += loop.preempted
        self.without_drafters += loop.without_drafters
        loop.preempted = loop.without_drafters = 0

    def count_landing(self, landing: Landing, recorded: bool) -> None:
        """A round was read."""
        size = landing.size
        self.rounds += 1
        self.replays += recorded
        self.rows += size.rows
        drafts = landing.verified
        self.draft_rows += drafts
        kind = "prompts" if landing.prompt_rows else "decoding"
        kind += " with drafts" if drafts else ""
        count, seconds = self.kinds.get(kind, (0, 0.0))
        self.kinds[kind] = count + 1, seconds + (landing.seconds or 0.0)
