"""A proposer's offers must be those of freshly computed state.

Stale drafter state cannot change text, so no comparison of texts finds it; it only wastes drafts.
Offers are recorded while requests go through what makes state stale: rounds that verify nothing,
rounds in which nobody proposes, preemption, prefix hits, slots that change hands. Then each text
is entered into a slot that was never used, of an engine that has just been made, and the offer
that its proposer makes there must be the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, run_jobs
from surefoot.certify.parity import Progress, base_jobs
from surefoot.certify.sizes import Size
from surefoot.certify.subject import Subject
from surefoot.engine.engine import Engine
from surefoot.engine.reports import Report
from surefoot.request import Request, SpeculationParams
from surefoot.speculation import registry
from surefoot.speculation.decisions import Decision, Situation
from surefoot.speculation.scoring import PromptReads
from surefoot.speculation.size import Size as RoundSize

OFFERS = "drafter state"
SPELL = 5
"""Rounds that a spell without verification, or without proposing, lasts."""
ALLOWED_DIFFERENCES = 0.02
"""Share of their drafts by which offers may differ where arithmetic is noisy: a drafter reads the
target's hidden states, whose last bits move with the batch. In one of ten trees two nodes that are
about as likely change places then, or one of them is not there. Stale state changes most drafts."""
MIN_TEXT = 4


@dataclass(frozen=True)
class Offer:
    """Drafts after ``text`` (output tokens) of job ``job``, as far as they can be verified.
    ``after``: what came before."""

    job: int
    text: tuple[int, ...]
    drafts: tuple[int, ...]
    after: str


def run_offers(judge: Judge, size: Size, progress: Progress) -> Section:
    """Check every proposer under test that says it can be checked."""
    section = Section(OFFERS)
    started = time.perf_counter()
    names = judge.subject.proposers
    for number, name in enumerate(names):
        progress(section.name, number, len(names))
        kind: Any = registry.find(name)
        if not kind.replayable:
            section.notes.append(f"{name} says that its offers cannot be replayed: not checked")
            continue
        _check(judge, section, size, name)
    progress(section.name, len(names), len(names))
    section.seconds = time.perf_counter() - started
    return section


def _check(judge: Judge, section: Section, size: Size, name: str) -> None:
    subject = judge.subject
    # Each prompt twice in a row: the second finds the first one's blocks.
    doubled = [job for job in base_jobs(judge, size, sampled=False) for _ in range(2)]
    jobs = [replace(job, method=name, arrival=3 * place) for place, job in enumerate(doubled)]
    chosen = _record(subject, section, jobs, name, recorded=False).choose(size.offers)
    if subject.recorded:
        recorder = _record(subject, section, jobs, name, recorded=True)
        chosen += recorder.choose(size.offers // 2)
    offered = sum(bool(offer.drafts) for offer in chosen)
    if offered < size.min_offers:
        section.gaps.append(
            f"{name} made only {offered} offers to check ({size.min_offers} needed)"
        )
    fresh = _recompute(subject, jobs, chosen, name)
    checked, apart = 0, list[float]()
    for offer, again in zip(chosen, fresh, strict=True):
        if again is None:
            continue
        checked += 1
        if again != offer.drafts:
            apart.append(difference(offer.drafts, again))
            section.notes.append(
                f"{name}, {offer.after}, after {len(offer.text)} tokens: offered "
                f"{list(offer.drafts)}, from fresh state {list(again)}"
            )
    allowed = 0 if judge.noise.regret_bound == 0 else ALLOWED_DIFFERENCES * checked
    mean = sum(apart) / max(1, len(apart))
    if apart and (not allowed or sum(apart) > allowed):
        section.problem(
            f"{name}: {len(apart)} of {checked} offers come from stale state, which differ by "
            f"{mean:.0%} of their drafts"
        )
    section.texts += checked
    section.details[name] = {
        "checked": checked,
        "with drafts": offered,
        "different": len(apart),
        "differ by": round(mean, 3),
        "situations": {
            kind: sum(offer.after == kind for offer in chosen)
            for kind in sorted({offer.after for offer in chosen})
        },
    }


def difference(offered: Sequence[int], again: Sequence[int]) -> float:
    """The share of the drafts that are in one of two offers only, wherever they stand in it."""
    common = (Counter(offered) & Counter(again)).total()
    return 1.0 - common / max(len(offered), len(again))


def _record(
    subject: Subject, section: Section, jobs: Sequence[Job], name: str, recorded: bool
) -> Recorder:
    """Run the jobs through spells, shortage of memory and prefix hits, keeping all offers.
    ``recorded``: in rounds of recorded sizes."""
    recorder = Recorder(_short_engine(subject, jobs, recorded), name, jobs)
    _, activity = run_jobs(recorder.engine, jobs, on_step=recorder.on_step)
    section.activity.add(activity)
    if not activity.preemptions:
        section.gaps.append("no request was preempted")
    if not activity.prefix_hits:
        section.gaps.append("no prefix was hit")
    if recorded and not recorder.offers:
        section.gaps.append(f"{name} made no offer in a recorded round")
    return recorder


def _short_engine(subject: Subject, jobs: Sequence[Job], recorded: bool) -> Engine:
    """With room for a request and its drafts, and for another without: were there room for two with
    long drafts, short texts would never be preempted."""
    longest = max(job.longest for job in jobs)
    drafts = subject.max_drafts
    block_size = subject.small_block
    return subject.engine(
        longest,
        4,
        recorded=recorded,
        enable_prefix_caching=True,
        block_size=block_size,
        kv_blocks=-(-(longest + drafts) // block_size) + -(-longest // block_size) + 2,
        max_num_batched_tokens=24,
    )


class _Listener:
    """Keeps one proposer's offers in an engine, with what came before them."""

    def __init__(self, engine: Engine, name: str, jobs: Sequence[Job]) -> None:
        self.engine = engine
        self.index = engine.controller.names.index(name)
        self.jobs = {job.prompt: index for index, job in enumerate(jobs)}
        self.offers: list[Offer] = []
        self.step = 0
        self._launch = engine.rounds.launch
        engine.rounds.launch = self.launch  # type: ignore[method-assign]

    def enter(self, request: Request, text: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        """A round left these drafts on offer for a request, behind ``text`` (output tokens)."""
        raise NotImplementedError

    def launch(self, size: RoundSize, keys: int, reads: PromptReads | None = None) -> Report:
        report = self._launch(size, keys, reads)
        if self.index not in size.proposers:
            return report
        report.wait()
        state, columns = self.engine.state, self.engine.round.books.columns
        slots = self.engine.round.slots[: size.spans].tolist()
        by_slot = {request.slot: request for request in self.engine.scheduler.running}
        for slot, row in zip(slots, report.rows.tolist(), strict=True):
            request = by_slot.get(slot)
            if request is None or not row[columns.COUNT] or row[columns.END]:
                continue
            whose, drafts, _ = columns.read_offer(row)
            if drafts and whose != self.index:
                continue
            text = state.history[slot, len(request.prompt) : int(state.length[slot])].tolist()
            self.enter(request, tuple(text), tuple(drafts))
        return report

    def on_step(self, step: int) -> None:
        self.step = step + 1

    @property
    def phase(self) -> int:
        """0: as usual, 1 and 3: what starves drafts."""
        return self.step // SPELL % 4

    def after(self, request: Request) -> str:
        """What came before this request's next offer."""
        if request.preemptions:
            found = "preemption"
        else:
            found = "prefix hit" if request.cached else self.after_spell()
        return f"{found}, recorded" if self.engine.rounds.recorded else found

    def after_spell(self) -> str:
        if self.step < SPELL:
            return "first rounds"
        return "rounds without proposing" if self.phase == 0 else "rounds without verifying"

    def choose(self, count: int) -> list[Offer]:
        """Offers that say something, every situation alike, those with drafts first."""
        unique = {(o.job, o.text): o for o in self.offers if len(o.text) >= MIN_TEXT}
        kinds: dict[str, list[Offer]] = {}
        for offer in unique.values():
            kinds.setdefault(offer.after, []).append(offer)
        chosen: list[Offer] = []
        for offers in kinds.values():
            with_drafts = [offer for offer in offers if offer.drafts]
            without = [offer for offer in offers if not offer.drafts]
            share = -(-count // len(kinds))
            picked = _spread(with_drafts, share - share // 6)
            chosen += picked + _spread(without, share - len(picked))
        return chosen[: count + len(kinds)]


class Recorder(_Listener):
    """Keeps the offers of rounds, and has some of them verify nothing, or nobody propose. Reading
    what a round leaves on the device waits for it: nothing is in flight then but what is read."""

    def __init__(self, engine: Engine, name: str, jobs: Sequence[Job]) -> None:
        super().__init__(engine, name, jobs)
        self._decide = engine.loop.planner.decide
        engine.loop.planner.decide = self.decide  # type: ignore[method-assign]

    @property
    def spell(self) -> int:
        """0: as usual, 1: nothing is verified, 2: nobody proposes."""
        return (0, 1, 0, 2)[self.phase]

    def decide(self, situation: Situation) -> Decision:
        decision = self._decide(situation)
        if self.spell == 1:
            return replace(decision, drafts=0)
        return replace(decision, proposers=(), steps=0) if self.spell == 2 else decision

    def enter(self, request: Request, text: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        self.offers.append(Offer(self.jobs[request.prompt], text, drafts, self.after(request)))


def _spread(offers: list[Offer], count: int) -> list[Offer]:
    if len(offers) <= count:
        return offers
    return [offers[index * len(offers) // count] for index in range(count)]


def _recompute(
    subject: Subject, jobs: Sequence[Job], offers: Sequence[Offer], name: str
) -> list[tuple[int, ...] | None]:
    """The offer that each text gets in a fresh slot; None where its last token came out
    differently (a tie)."""
    if not offers:
        return []
    longest = max(jobs[offer.job].longest for offer in offers)
    engine = subject.engine(longest, len(offers), recorded=False)
    found: dict[str, Request] = {}
    for index, offer in enumerate(offers):
        job = jobs[offer.job]
        request = engine.make_request(
            f"fresh-{index}", job.prompt, job.params, SpeculationParams(name)
        )
        request.output.extend(offer.text[:-1])
        found[request.request_id] = request
        engine.add(request)
    recorder = _FirstOffers(engine, name)
    while len(recorder.drafts) < len(offers) and engine.has_work:
        engine.step()
    results: list[tuple[int, ...] | None] = []
    for index, offer in enumerate(offers):
        text, drafts = recorder.drafts.get(f"fresh-{index}", ((), ()))
        results.append(drafts if text == offer.text else None)
    return results


class _FirstOffers(_Listener):
    """Keeps the first offer that each request gets, with the output it follows."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, name, ())
        self.drafts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def enter(self, request: Request, text: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        self.drafts.setdefault(request.request_id, (text, drafts))
