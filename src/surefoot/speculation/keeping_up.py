"""Telling proposers with state of their own what rounds settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from surefoot.kernels.backend import Backend
from surefoot.speculation.backlog import Backlog
from surefoot.speculation.controller import Controller
from surefoot.speculation.proposer import Commits, Needs, Proposer, blamed
from surefoot.speculation.state import SlotState

_MEAN_OF = 50
"""Catch-ups of late, about, that tell what a row takes."""
_PAUSE = 8.0
"""Times as long as believed, that a catch-up took at most: else the machine did something else."""


class RowSeconds:
    """What drafters take to keep up with a row that they do not draft behind, as a mean of late:
    with how few rows at a time they do depends on the traffic."""

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0

    @property
    def mean(self) -> float:
        """0.0 as long as nothing is known."""
        return self._seconds / self._rows if self._rows else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """They caught up on so many rows at a time."""
        if self._seconds:
            seconds = min(seconds, _PAUSE * self.mean * rows)
        kept = 1.0 - 1.0 / _MEAN_OF
        self._rows = kept * self._rows + rows
        self._seconds = kept * self._seconds + seconds


class KeepingUp:
    """Those without a network hear of every round. Those with one keep up for the requests that
    allow them: at once where one of them is to draft, and later, on many rows together, where none
    is and rounds may look at tensors on the host (``Backlog``)."""

    def __init__(
        self,
        backend: Backend,
        state: SlotState,
        proposers: Sequence[Proposer],
        needs: Sequence[Needs],
        controller: Controller,
    ) -> None:
        self.proposers = proposers
        self.needs = needs
        self.controller = controller
        wanted = {layer for need in needs for layer in need.captured_layers}
        self.capture = tuple(sorted(wanted))
        """The layers that some proposer reads, rising."""
        # What every round would otherwise ask again.
        stateful = [
            index
            for index, proposer in enumerate(proposers)
            if type(proposer).catch_up is not Proposer.catch_up
        ]
        self._networks = [index for index in stateful if needs[index].has_network]
        self._others = [index for index in stateful if not needs[index].has_network]
        self._allowed = list(controller.allowed)
        self.backlog = Backlog(state, backend.drafting, backend.late_rows)
        """What drafters have yet to catch up on."""
        self.late_seconds = 0.0
        """What the last round spent on rows of earlier ones, where drafters had to catch up on such
        as well as its own: that is owed whoever drafts, and no part of what its drafts cost."""
        self._seconds = 0.0
        """For the rows of a round alone."""
        self.row_seconds = RowSeconds()
        """Observed whenever drafters catch up on a CPU; of a GPU, whose operations end later than
        they are called, it is told when the engine starts."""
        self._observes = state.device.type == "cpu"

    def tells(self, networks: bool) -> bool:
        """Whether anybody wants to hear of a round; ``networks``: also if drafters keep up."""
        return bool(self._active(self._others) or (networks and self._active(self._networks)))

    @property
    def only_networks(self) -> bool:
        """Whether nobody else wants to hear of rounds."""
        return not self._active(self._others)

    def entering(self, found: Sequence[int]) -> Callable[[torch.Tensor], None] | None:
        """What tells proposers, when it is called with the slots int64 [B], that requests entered
        them, of which so many leading positions were ``found`` in the prefix cache; None: nobody
        does anything then."""
        listening = [
            index
            for index in self.controller.active
            if getattr(self.proposers[index].admit, "__func__", None) is not Proposer.admit
        ]
        return partial(self._enter, listening, found) if listening else None

    def _enter(self, listening: Sequence[int], found: Sequence[int], slots: torch.Tensor) -> None:
        for index in listening:
            proposer = self.proposers[index]
            with blamed(proposer, "admit"):
                proposer.admit(slots, found)

    def works(self, commits: Commits) -> list[Callable[[], None]]:
        """Each tells one of those with a network at once; none needs what another does."""
        return [partial(self._tell, [index], commits) for index in self._active(self._networks)]

    def settled(self, commits: Commits, networks: bool, drafting: bool, trees: bool) -> None:
        """A round settled these rows, with ``features`` [N, …] of all captured layers.
        ``networks``: whether drafters keep up with it at all; ``drafting``: whether one of them is
        to draft now; ``trees``: whether rows may stand in trees."""
        if self._others:
            self._tell(self._active(self._others), commits)
        active = self._active(self._networks) if networks else []
        if not active:
            return
        late = self.backlog.rows > 0
        if drafting and not late:
            begun = time.perf_counter()
            self._tell(active, commits)
            self._seconds = time.perf_counter() - begun
            return
        if trees or not self.backlog.keep(commits):
            self.late_seconds += self.catch_up()
            late = False
            if trees or not self.backlog.keep(commits):
                self._tell_apart(commits, time.perf_counter())
        if drafting:
            seconds = self.catch_up()
            if late:
                self.late_seconds += max(0.0, seconds - self._seconds)

    def catch_up(self) -> float:
        """Have drafters read what they have not read yet: to be called before a slot or a block
        changes hands. Returns the seconds that it took."""
        begun = time.perf_counter()
        commits = self.backlog.take()
        return 0.0 if commits is None else self._tell_apart(commits, begun)

    def _tell_apart(self, commits: Commits, begun: float) -> float:
        """Tell drafters of rows that are no part of what drafts cost. Returns the seconds since it
        ``begun``."""
        self._tell(self._active(self._networks), commits)
        seconds = time.perf_counter() - begun
        if self._observes:
            self.row_seconds.observe(int(commits.counts.sum()), seconds)
        return seconds

    def _active(self, proposers: Sequence[int]) -> list[int]:
        """Those of them that were not switched off."""
        return [index for index in proposers if index in self.controller.active]

    def _tell(self, proposers: Sequence[int], commits: Commits) -> None:
        """``proposers`` are active."""
        for index in proposers:
            proposer, need = self.proposers[index], self.needs[index]
            own = commits
            if need.captured_layers != self.capture:
                features = select_layers(commits.features, self.capture, need.captured_layers)
                own = own._replace(features=features)
            if need.has_network:
                own = own._replace(served=self._allowed[index])
            with blamed(proposer, "catch_up"):
                proposer.catch_up(own)


def select_layers(
    features: torch.Tensor, captured: Sequence[int], wanted: Sequence[int]
) -> torch.Tensor:
    """The ``wanted`` layers of ``features`` [N, captured * hidden] side by side; without a copy
    where they are neighbours."""
    if not wanted:
        return features[:, :0]
    hidden = features.shape[1] // len(captured)
    places = [captured.index(layer) for layer in wanted]
    if places == list(range(places[0], places[0] + len(places))):
        return features[:, places[0] * hidden : (places[-1] + 1) * hidden]
    return torch.cat([features[:, at * hidden : (at + 1) * hidden] for at in places], dim=1)
