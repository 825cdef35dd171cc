"""Stale drafter state: it changes no text, so offers are compared with those of fresh state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from certify_setups import one_thread, register  # noqa: F401
from eagle3_engines import folder, target
from harness import VOCAB, random_weights, tiny_config
from surefoot.certify.certificate import calibration_texts
from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.noise import measure_noise
from surefoot.certify.offers import difference, run_offers
from surefoot.certify.prompts import default_prompts
from surefoot.certify.sizes import DEFAULT, QUICK
from surefoot.certify.subject import Subject
from surefoot.config import EngineConfig
from surefoot.engine.rounds import PaddedRounds
from surefoot.kernels.backend import Backend
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposer import Commits, Drafts, Needs, Proposer


class Summing(Proposer):
    """A stand-in for a drafter with KV: keeps a sum over the text of each slot, and offers what
    the sum says. Brings it up to date from what rounds settle; recomputes what it did not see."""

    name = "summing"

    class Options:
        __dataclass_fields__ = {}  # noqa: RUF012

    def __init__(self, options: Any, state: Any) -> None:
        super().__init__(options, state)
        self.sums = torch.zeros(state.slots, dtype=torch.int64)
        self.known = torch.zeros(state.slots, dtype=torch.int64)

    def needs(self) -> Needs:
        return Needs(longest_draft=2)

    def admit(self, slots: torch.Tensor, found: Sequence[int]) -> None:
        self.sums[slots] = self.known[slots] = 0

    def catch_up(self, commits: Commits) -> None:
        for slot, first, count in zip(
            commits.slots.tolist(), commits.first.tolist(), commits.counts.tolist(), strict=True
        ):
            self.fill_gap(slot, first)
            self.add(slot, first + count)

    def fill_gap(self, slot: int, first: int) -> None:
        """Positions found in the prefix cache never came by."""
        self.add(slot, first)

    def add(self, slot: int, end: int) -> None:
        for at in range(int(self.known[slot]), end):
            self.sums[slot] = (self.sums[slot] * 31 + self.state.history[slot, at] * (at + 1)) % 997
        self.known[slot] = max(end, int(self.known[slot]))

    def propose(self, slots: torch.Tensor) -> Drafts:
        tokens = torch.stack((self.sums[slots] % VOCAB, self.sums[slots] // 7 % VOCAB), dim=1)
        lengths = 1 + self.sums[slots] % 2
        return Drafts(tokens, lengths, torch.full(tokens.shape, 0.5))


class ForgetsPrefixHits(Summing):
    name = "forgets-prefix-hits"

    def fill_gap(self, slot: int, first: int) -> None:
        self.known[slot] = max(first, int(self.known[slot]))


class KeepsOldSlots(Summing):
    """Does not notice that a slot has a new owner."""

    name = "keeps-old-slots"

    def admit(self, slots: torch.Tensor, found: Sequence[int]) -> None:
        self.known[slots] = 0


class SleepsInSpells(Summing):
    """Catches up only when it is asked for drafts, and then with the last round alone."""

    name = "sleeps-in-spells"

    def catch_up(self, commits: Commits) -> None:
        self.last = commits

    def propose(self, slots: torch.Tensor) -> Drafts:
        wanted = set(slots.tolist())
        for slot, first, count in zip(
            self.last.slots.tolist(),
            self.last.first.tolist(),
            self.last.counts.tolist(),
            strict=True,
        ):
            if slot in wanted:
                if self.known[slot] == 0:
                    self.add(slot, first)
                self.known[slot] = first
                self.add(slot, first + count)
        return super().propose(slots)


class Unreplayable(KeepsOldSlots):
    name = "unreplayable"
    replayable = False


class ChangesPlaces(Summing):
    """Two drafts that are about as likely, now in this order, now in that."""

    name = "changes-places"
    calls = 0

    def propose(self, slots: torch.Tensor) -> Drafts:
        drafts = super().propose(slots)
        self.calls += 1
        # At the end of a text there is room for one of them only.
        room = (self.state.limit - self.state.length)[slots] > 2
        rolled = drafts.tokens.roll(self.calls % 2, dims=1)
        tokens = torch.where(room[:, None], rolled, drafts.tokens)
        return replace(drafts, tokens=tokens, lengths=0 * drafts.lengths + 2)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (Summing, ForgetsPrefixHits, KeepsOldSlots, SleepsInSpells, Unreplayable, ChangesPlaces)
    register(monkeypatch, *kinds)


def backend() -> Backend:
    """The quicker one that is there; on one thread, since cores are shared."""
    if native_unavailable() is not None:
        return TorchBackend("cpu", torch.float32)
    from surefoot.kernels.cpu.backend import NativeBackend

    return NativeBackend(torch.float32, 1)


def check(name: str, size: Any = QUICK, recorded: bool = False, noisy: bool = False) -> Section:
    decoder = Decoder(tiny_config(), random_weights(tiny_config()), backend())
    config, prompts = EngineConfig(proposers=(name,)), default_prompts(VOCAB, 160)
    subject = Subject(decoder, config, prompts, recorded=recorded)
    noise = measure_noise(decoder, calibration_texts(subject))
    size = replace(size, greedy_jobs=5, greedy_length=30)
    # Offers of these proposers do not depend on logits at all.
    noise = replace(noise, largest_spread=0.01 * noisy)
    return run_offers(Judge(subject, noise), size, lambda label, done, total: None)


@pytest.mark.parametrize("name", ["summing", "ngram"])
def test_honest_proposers_pass(name: str) -> None:
    section = check(name)
    assert section.problems == [] and section.gaps == []
    details = section.details[name]
    assert details["checked"] >= QUICK.min_offers and details["different"] == 0
    situations = details["situations"]
    assert {"prefix hit", "preemption"} <= set(situations)
    assert any(kind.startswith("rounds without") for kind in situations)


def test_offers_of_recorded_rounds_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    section = check("summing", recorded=True)
    assert section.problems == [] and section.gaps == []
    situations = section.details["summing"]["situations"]
    recorded = sum(count for name, count in situations.items() if name.endswith("recorded"))
    assert recorded >= QUICK.min_offers

    run = PaddedRounds.run

    def late(self: PaddedRounds, *args: Any) -> Any:
        result, offers = run(self, *args), self.round.books.offers
        offers.tokens.copy_(offers.tokens.roll(1, dims=1))
        report, first = self.round.books.report, self.round.books.columns.offer
        drafts = report[:, first : first + offers.tokens.shape[1]]
        drafts.copy_(drafts.roll(1, dims=1))
        return result

    monkeypatch.setattr(PaddedRounds, "run", late)
    section = check("summing", recorded=True)
    assert len(section.problems) == 1 and "stale" in section.problems[0]


@pytest.mark.parametrize("name", ["forgets-prefix-hits", "keeps-old-slots", "sleeps-in-spells"])
@pytest.mark.parametrize("size", [QUICK, DEFAULT], ids=["quick", "default"])
def test_stale_state_is_found(name: str, size: Any) -> None:
    section = check(name, size)
    assert len(section.problems) == 1 and "stale" in section.problems[0]


def test_trees_may_differ_by_what_noise_explains() -> None:
    """Of EAGLE-3's on a GPU, where rows of trees are not computed like those of chains."""
    tree = (30, 28, 564, 657, 357, 284, 288, 527, 1012, 378, 284, 357, 357, 339, 314, 357)
    again = (30, 28, 564, 657, 357, 284, 288, 527, 378, 1012, 357, 564, 357, 339, 314, 357)
    assert difference(tree, again) == pytest.approx(1 / 16) == difference(again, tree)
    assert difference(tree, tree[::-1]) == 0.0
    assert difference(tree, ()) == 1.0 == difference((), (3,)) and difference((5, 5), (5,)) == 0.5


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", ["changes-places", "forgets-prefix-hits"])
def test_where_arithmetic_is_noisy_drafts_may_change_places(name: str, noisy: bool) -> None:
    section = check(name, noisy=noisy)
    assert bool(section.problems) == (not noisy or name == "forgets-prefix-hits")
    details = section.details[name]
    assert details["different"] > 0 and bool(details["differ by"]) == (name != "changes-places")


def test_a_proposer_may_say_that_it_cannot_be_replayed() -> None:
    section = check("unreplayable")
    assert section.problems == [] and "not checked" in section.notes[0]


def test_trees_near_the_end_of_a_text_are_cut_alike() -> None:
    """By their depth: more nodes than tokens that may still come can be verified."""
    own = {"path": folder("skilled"), "top_k": 3, "depth": 4, "draft_tokens": 8}
    config = EngineConfig(proposers=("eagle3",), proposer_options={"eagle3": own})
    subject = Subject(target("torch"), config, default_prompts(VOCAB, 160), recorded=True)
    noise = replace(measure_noise(subject.decoder, calibration_texts(subject)), largest_spread=0.0)
    size = replace(QUICK, greedy_jobs=4, greedy_length=12, offers=200)
    section = run_offers(Judge(subject, noise), size, lambda label, done, total: None)
    assert section.problems == [] and section.details["eagle3"]["with drafts"] > 20


def test_short_texts_are_preempted_beside_large_trees() -> None:
    """Room for two requests and their trees would be room for all."""
    own = {"path": folder("skilled"), "top_k": 4, "depth": 6, "draft_tokens": 16}
    config = EngineConfig(proposers=("eagle3",), proposer_options={"eagle3": own})
    subject = Subject(target("torch"), config, default_prompts(VOCAB, 160))
    noise = measure_noise(subject.decoder, calibration_texts(subject))
    size = replace(QUICK, greedy_jobs=4, greedy_length=16)
    section = run_offers(Judge(subject, noise), size, lambda label, done, total: None)
    assert section.gaps == [] and section.activity.preemptions > 0
