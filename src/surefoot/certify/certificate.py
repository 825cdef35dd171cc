"""The certificate: runs all sections, weighs them, and says PASS, FAIL or INCONCLUSIVE."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from surefoot.certify import long_texts
from surefoot.certify.compare import Judge
from surefoot.certify.coverage import coverage
from surefoot.certify.findings import NEAR, Refusals, Section, guarded
from surefoot.certify.jobs import CROWD
from surefoot.certify.more import MORE, run_more
from surefoot.certify.noise import Noise, measure_noise
from surefoot.certify.offers import OFFERS, run_offers
from surefoot.certify.parity import Progress
from surefoot.certify.selftest import Trial, choose_defects, run_section, run_self_test
from surefoot.certify.sizes import DEFAULT, Size
from surefoot.certify.subject import RUNNER_UP, Subject

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 2}
COMPARING = ("greedy parity", "sampled parity", "sampling parameters", long_texts.NAME)
PARITY = (*COMPARING, MORE)
"""The sections that compare token by token."""
SECTIONS = (*COMPARING, "distribution")
EVENTS = {
    "preemptions": "no request was preempted",
    "prefix_hits": "no prefix was hit",
    "cancellations": "no request was cancelled",
    "chunked": "no prompt was prefilled in chunks",
}
"""What must have happened to some request, and what is said if it did not."""
RECORDED, CALLED = "recorded", "called"
"""The rounds that requests with drafts went through: of recorded sizes, or called with just the
rows that they need."""
CALIBRATION_TEXTS = 8
CALIBRATION_TOKENS = 40
SURE = 0.999


@dataclass
class Certificate:
    """``reasons`` say why it is no PASS; ``trials`` is None if no self-test was made. ``covered``
    and ``not_covered``: what the result is about, in words."""

    setup: dict[str, Any]
    size: Size
    noise: Noise
    sections: list[Section] = field(default_factory=list)
    trials: list[Trial] | None = None
    covered: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    more: int = 0
    """Batches of further texts that the counts took."""
    seconds: float = 0.0

    @property
    def positions(self) -> int:
        return sum(section.positions for section in self.sections)

    @property
    def parity_positions(self) -> int:
        """Positions compared with plain decoding token by token."""
        return sum(s.positions for s in self.sections if s.name in PARITY)

    def total(self, counter: str, names: tuple[str, ...] | None = None) -> int:
        """Sum of an activity's counter over the sections that compare token by token, and over
        these proposers, or all."""
        counters = [getattr(s.activity, counter) for s in self.sections if s.name in PARITY]
        return sum(
            value for item in counters for key, value in item.items() if not names or key in names
        )

    def total_of(self, event: str) -> int:
        """Sum of one of an activity's plain counters over the same sections."""
        return sum(getattr(s.activity, event) for s in self.sections if s.name in PARITY)

    @property
    def wrong_acceptance_seen(self) -> float:
        """Smallest chance of accepting a wrong draft that the run would have seen for sure
        (99.9 %): each rejection was an opportunity."""
        return seen_from(self.total("rejections"))

    @property
    def refusals(self) -> Refusals:
        """Of runners-up, over the same sections."""
        every = Refusals()
        for section in self.sections:
            if section.name in PARITY:
                every.add(section.refusals)
        return every

    @property
    def lenient_acceptance_seen(self) -> float | None:
        """Smallest distance (logits, above the bound of ties) at which a judge that takes the
        runner-up would have been seen for sure: the nearest one that was offered, and refused."""
        return self.refusals.nearest if self.refusals.gaps else None

    @property
    def disproofs(self) -> list[str]:
        return [f"{s.name}: {problem}" for s in self.sections for problem in s.problems]

    @property
    def missing(self) -> dict[str, str]:
        """Counts that are still too small, in words, by whose drafts would raise them: a
        proposer's, or "" for anybody's."""
        size, found = self.size, {}
        if self.parity_positions < size.min_positions:
            found[""] = f"{self.parity_positions} positions compared, {size.min_positions} needed"
        rejections, near = self.total("rejections"), self.refusals.near
        if rejections < size.min_rejections:
            found[""] = f"{rejections} spans had a draft rejected, {size.min_rejections} needed"
        if near < size.min_near:
            found[RUNNER_UP] = (
                f"{near} runners-up within {NEAR} of the best token were refused, "
                f"{size.min_near} needed"
            )
        for name in self.setup["proposers"]:
            for counter, least in (
                ("verified", size.min_verified),
                ("accepted", size.min_accepted),
            ):
                count = self.total(counter, (name,))
                if count < least and name not in found:
                    found[name] = f"{count} drafts of {name} were {counter}, {least} needed"
        return found

    @property
    def gaps(self) -> list[str]:
        """What was tested too little."""
        tried = f", after {self.more} batches of further texts" if self.more else ""
        found = [words + tried for words in self.missing.values()]
        if self.setup["requests"] > CROWD and self.total_of("crowded") < self.size.min_crowded:
            found.append(
                f"{self.total_of('crowded')} spans had a draft rejected beside more than {CROWD} "
                f"requests, {self.size.min_crowded} needed"
            )
        for what, words in EVENTS.items():
            if not self.total_of(what):
                found.append(words)
        found += [f"{s.name}: {gap}" for s in self.sections for gap in s.gaps]
        if not self.noise.plausible:
            found.append(
                f"logits move by {self.noise.largest_spread:.3g} with the batch, rounding explains "
                f"{self.noise.plausible_limit:.3g}: the backend itself is suspect"
            )
        for trial in self.trials or ():
            if not trial.caught:
                found.append(f"self-test: an engine that {trial.defect} was not found out")
            elif self.setup["rounds"] == RECORDED and not trial.recorded:
                found.append(f"self-test: an engine that {trial.defect} ran no recorded round")
        return found

    @property
    def result(self) -> str:
        if self.disproofs:
            return FAIL
        return INCONCLUSIVE if self.gaps else PASS

    @property
    def reasons(self) -> list[str]:
        return [*self.disproofs, *self.gaps]

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        noise = asdict(self.noise)
        noise |= {
            "regret_bound": self.noise.regret_bound,
            "logprob_tolerance": self.noise.logprob_tolerance,
            "plausible": self.noise.plausible,
            "bit_exact": self.noise.bit_exact,
        }
        return {
            "result": self.result,
            "reasons": self.reasons,
            "self_test": None if self.trials is None else [t.to_json() for t in self.trials],
            "setup": self.setup,
            "thresholds": {
                key: value for key, value in vars(self.size).items() if key.startswith("min_")
            },
            "size": self.size.name,
            "rounds": {
                "recorded": self.total_of("replays"),
                "called": self.total_of("called"),
            },
            "positions_compared": self.parity_positions,
            "ties": sum(len(section.ties) for section in self.sections),
            "divergences": sum(len(section.divergences) for section in self.sections),
            "noise": noise,
            "wrong_acceptance_seen": self.wrong_acceptance_seen,
            "wrong_acceptance_in_crowds_seen": seen_from(self.total_of("crowded")),
            "lenient_acceptance_seen": self.lenient_acceptance_seen,
            "runners_up": self.refusals.to_json(),
            "covered": self.covered,
            "not_covered": self.not_covered,
            "further_batches": self.more,
            "sections": [section.to_json() for section in self.sections],
            "seconds": round(self.seconds, 1),
        }


def seen_from(opportunities: int) -> float:
    """Smallest chance of an event that so many opportunities would have shown for sure."""
    return 1.0 - (1 - SURE) ** (1 / opportunities) if opportunities else 1.0


def certify(
    subject: Subject,
    setup: dict[str, Any],
    progress: Progress,
    size: Size = DEFAULT,
    self_test: bool = True,
) -> Certificate:
    """Run a certificate. ``setup`` describes the set-up for the record; ``progress`` is called
    with (label, done, total)."""
    started = time.perf_counter()
    progress("calibrating noise", 0, 1)
    texts = calibration_texts(subject)
    noise = measure_noise(subject.decoder, texts, subject.trees)
    progress("calibrating noise", 1, 1)
    setup = {
        **setup,
        "rounds": RECORDED if subject.recorded else CALLED,
        "requests": subject.config.max_num_seqs,
        "proposers": list(subject.proposers),
        "hosts": list(subject.hosts),
        "probes": list(subject.probes),
    }
    certificate = Certificate(setup, size, noise)
    judge = Judge(subject, noise)
    if self_test:
        chosen, left_out = choose_defects(subject, noise.regret_bound)
        certificate.trials = run_self_test(judge, size, progress, chosen)
        certificate.not_covered += [f"Self-test of {words}." for words in left_out]
    for name in SECTIONS:
        certificate.sections.append(run_section(name, judge, size, progress))
    go_on(certificate, judge, progress)
    offers = partial(run_offers, judge, size, progress)
    certificate.sections.append(guarded(Section(OFFERS), offers))
    certificate.covered, without = coverage(certificate, subject)
    certificate.not_covered = without + certificate.not_covered
    certificate.seconds = time.perf_counter() - started
    return certificate


def go_on(certificate: Certificate, judge: Judge, progress: Progress) -> None:
    """Compare further texts until the counts are reached, ``Size.more`` batches of them at most, or
    something is disproved."""
    size, section = certificate.size, Section(MORE)
    while certificate.missing and certificate.more < size.more and not certificate.disproofs:
        if section not in certificate.sections:
            certificate.sections.append(section)
        progress(MORE, certificate.more, size.more)
        wanted = list(certificate.missing)
        guarded(section, partial(run_more, judge, section, size, certificate.more, wanted))
        certificate.more += 1
    if certificate.more:
        progress(MORE, size.more, size.more)


def calibration_texts(subject: Subject) -> list[list[int]]:
    """Prompts with some plain text behind them, of about the same length."""
    from surefoot.certify.jobs import Job, run_jobs
    from surefoot.request import SamplingParams

    limit = min(CALIBRATION_TOKENS, subject.decoder.config.max_positions)
    prompts = [prompt[: limit * 2 // 3] for prompt in subject.prompts[:CALIBRATION_TEXTS]]
    jobs = [
        Job(p, SamplingParams(temperature=0, max_tokens=limit - len(p), ignore_eos=True))
        for p in prompts
    ]
    engine = subject.engine(limit, len(jobs), max_draft_tokens=0)
    outcomes, _ = run_jobs(engine, jobs)
    return [[*p, *outcome.tokens] for p, outcome in zip(prompts, outcomes, strict=True)]
