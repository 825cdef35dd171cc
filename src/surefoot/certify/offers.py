"""A proposer's offers must be those of freshly computed state.

Stale drafter state cannot change text, so no comparison of texts finds it; it only wastes drafts.
Offers are recorded while requests go through what makes state stale: rounds that verify nothing,
rounds in which nobody proposes, preemption, prefix hits, slots that change hands. Then each text
is entered into a slot that was never used, of an engine that has just been made, and the offer
that its proposer makes there must be the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, run_jobs
from surefoot.certify.parity import Progress, base_jobs
from surefoot.certify.sizes import Size
from surefoot.certify.subject import Subject
from surefoot.engine.engine import Engine
from surefoot.engine.graphs import Report
from surefoot.request import Request, SpeculationParams
from surefoot.speculation import registry
from surefoot.speculation.layout import RoundPlan
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.replay import Size as ReplaySize
from surefoot.speculation.round import Wanted

SPELL = 5
"""Rounds that a spell without verification, or without proposing, lasts."""
ALLOWED_DIFFERENCES = 0.02
"""Share of offers that may differ where arithmetic is noisy: a drafter reads the target's hidden
states, whose last bits move with the batch. Stale state changes most offers."""
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
    section = Section("drafter state")
    started = time.perf_counter()
    names = judge.subject.proposers
    for number, name in enumerate(names):
        progress(section.name, number, len(names))
        if not registry.find(name).replayable:
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
    chosen = _record(subject, section, jobs, name).choose(size.offers)
    if subject.recorded:
        chosen += _record_replays(subject, section, jobs, name).choose(size.offers // 2)
    offered = sum(bool(offer.drafts) for offer in chosen)
    if offered < size.min_offers:
        section.gaps.append(
            f"{name} made only {offered} offers to check ({size.min_offers} needed)"
        )
    fresh = _recompute(subject, jobs, chosen, name)
    checked = different = 0
    for offer, again in zip(chosen, fresh, strict=True):
        if again is None:
            continue
        checked += 1
        if again != offer.drafts:
            different += 1
            section.notes.append(
                f"{name}, {offer.after}, after {len(offer.text)} tokens: offered "
                f"{list(offer.drafts)}, from fresh state {list(again)}"
            )
    allowed = 0 if judge.noise.regret_bound == 0 else round(ALLOWED_DIFFERENCES * checked)
    if different > allowed:
        section.problem(f"{name}: {different} of {checked} offers come from stale state")
    section.texts += checked
    section.details[name] = {
        "checked": checked,
        "with drafts": offered,
        "different": different,
        "situations": {
            kind: sum(offer.after == kind for offer in chosen)
            for kind in sorted({offer.after for offer in chosen})
        },
    }


def _record(subject: Subject, section: Section, jobs: Sequence[Job], name: str) -> Recorder:
    """Run the jobs through spells, shortage of memory and prefix hits, keeping all offers."""
    recorder = Recorder(_short_engine(subject, jobs, recorded=False), name, jobs)
    _, activity = run_jobs(recorder.engine, jobs, on_step=recorder.on_step)
    section.activity.add(activity)
    if not activity.preemptions:
        section.gaps.append("no request was preempted")
    if not activity.prefix_hits:
        section.gaps.append("no prefix was hit")
    return recorder


def _record_replays(
    subject: Subject, section: Section, jobs: Sequence[Job], name: str
) -> ReplayRecorder:
    """The same through recorded rounds, as far as they reach."""
    recorder = ReplayRecorder(_short_engine(subject, jobs, recorded=True), name, jobs)
    _, activity = run_jobs(recorder.engine, jobs, on_step=recorder.on_step)
    section.activity.add(activity)
    if recorder.engine.pipeline is not None and not recorder.offers:
        section.gaps.append(f"{name} made no offer in a recorded round")
    return recorder


def _short_engine(subject: Subject, jobs: Sequence[Job], recorded: bool) -> Engine:
    """With room for two requests."""
    longest = max(job.longest for job in jobs)
    drafts = subject.max_drafts
    block_size = 4
    return subject.engine(
        longest,
        4,
        recorded=recorded,
        enable_prefix_caching=True,
        block_size=block_size,
        kv_blocks=2 * (-(-(longest + drafts) // block_size) + 1),
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

    def on_step(self, step: int) -> None:
        self.step = step + 1

    @property
    def phase(self) -> int:
        """0: as usual, 1 and 3: what starves drafts."""
        return self.step // SPELL % 4

    def after(self, request: Request) -> str:
        if request.preemptions:
            return "preemption"
        return "prefix hit" if request.cached else self.after_spell()

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


class ReplayRecorder(_Listener):
    """Reads what recorded rounds leave on the device for the next one, and lets some of them
    verify nothing. Reading it waits for the round: nothing is in flight then but what is read."""

    def __init__(self, engine: Engine, name: str, jobs: Sequence[Job]) -> None:
        super().__init__(engine, name, jobs)
        if engine.pipeline is not None:
            self._launch = engine.pipeline.graphs.launch
            engine.pipeline.graphs.launch = self.launch  # type: ignore[method-assign]

    def launch(self, size: ReplaySize) -> Report:
        pipeline = self.engine.pipeline
        assert pipeline is not None and pipeline._seated is not None
        result = self._launch(replace(size, rows=size.spans) if self.phase % 2 else size)
        replay, state = pipeline.replay, self.engine.state
        for request in pipeline._seated.requests:
            slot = request.slot
            if not int(replay.alive[slot]):
                continue
            length, count = int(state.length[slot]), int(replay.lengths[slot])
            if count and int(replay.proposer[slot]) != self.index:
                continue
            text = tuple(state.history[slot, len(request.prompt) : length].tolist())
            drafts = tuple(replay.tokens[slot, :count].tolist())
            after = f"{self.after(request)}, recorded"
            self.offers.append(Offer(self.jobs[request.prompt], text, drafts, after))
        return result

    def after_spell(self) -> str:
        return "first rounds" if self.step < SPELL else "rounds without verifying"


class Recorder(_Listener):
    """Listens to the offers of rounds that the host plans, and starves their drafts in spells."""

    def __init__(self, engine: Engine, name: str, jobs: Sequence[Job]) -> None:
        super().__init__(engine, name, jobs)
        self._offer = engine.controller.offer
        self._split = engine.controller.split
        self._draft = engine.round.draft
        for place, attribute in (
            (engine.controller, "offer"),
            (engine.controller, "split"),
            (engine.round, "draft"),
        ):
            setattr(place, attribute, getattr(self, attribute))

    @property
    def spell(self) -> int:
        """0: as usual, 1: nothing is verified, 2: nobody proposes."""
        return (0, 1, 0, 2)[self.phase]

    def offer(self, index: int, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        # As far as they can be verified: recorded rounds keep no more of them.
        lengths = self._offer(index, slots, drafts)
        if index == self.index:
            by_slot = {request.slot: request for request in self.engine.scheduler.running}
            for slot, tokens, length in zip(
                slots.tolist(), drafts.tokens.tolist(), lengths.tolist(), strict=True
            ):
                self._enter(by_slot[slot], slot, tuple(tokens[:length]))
        return lengths

    def _enter(self, request: Request, slot: int, drafts: tuple[int, ...]) -> None:
        length = int(self.engine.state.length[slot])
        known = self.engine.state.history[slot, :length].tolist()
        text = tuple(known[len(request.prompt) :])
        self.offers.append(Offer(self.jobs[request.prompt], text, drafts, self.after(request)))

    def split(self, choice: object, base_rows: int) -> torch.Tensor:
        counts = self._split(choice, base_rows)  # type: ignore[arg-type]
        return torch.zeros_like(counts) if self.spell == 1 else counts

    def draft(self, plan: RoundPlan, wanted: Wanted) -> torch.Tensor:
        if self.spell != 2:
            return self._draft(plan, wanted)
        # What was offered before does not fit the text any more.
        self.engine.controller.lengths[:, plan.slots] = 0
        return torch.zeros_like(plan.slots)


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


class _FirstOffers:
    """Keeps the first offer that each request gets, with the output it follows."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.index = engine.controller.names.index(name)
        self.drafts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._offer = engine.controller.offer
        engine.controller.offer = self.offer  # type: ignore[method-assign]

    def offer(self, index: int, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        lengths = self._offer(index, slots, drafts)
        if index == self.index:
            by_slot = {request.slot: request for request in self.engine.scheduler.running}
            for slot, tokens, length in zip(
                slots.tolist(), drafts.tokens.tolist(), lengths.tolist(), strict=True
            ):
                request = by_slot[slot]
                size = int(self.engine.state.length[slot])
                known = self.engine.state.history[slot, len(request.prompt) : size].tolist()
                self.drafts.setdefault(request.request_id, (tuple(known), tuple(tokens[:length])))
        return lengths
