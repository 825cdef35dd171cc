"""The certificate: runs all sections, weighs them, and says PASS, FAIL or INCONCLUSIVE."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.noise import Noise, measure_noise
from surefoot.certify.offers import run_offers
from surefoot.certify.parity import Progress
from surefoot.certify.selftest import Trial, run_section, run_self_test
from surefoot.certify.sizes import DEFAULT, Size
from surefoot.certify.subject import Subject

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 2}
PARITY = ("greedy parity", "sampled parity", "sampling parameters", "long texts")
SECTIONS = (*PARITY, "distribution")
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
    """``reasons`` say why it is no PASS; ``trials`` is None if no self-test was made."""

    setup: dict[str, Any]
    size: Size
    noise: Noise
    sections: list[Section] = field(default_factory=list)
    trials: list[Trial] | None = None
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
        rejections = self.total("rejections")
        return 1.0 - (1 - SURE) ** (1 / rejections) if rejections else 1.0

    @property
    def disproofs(self) -> list[str]:
        return [f"{s.name}: {problem}" for s in self.sections for problem in s.problems]

    @property
    def gaps(self) -> list[str]:
        """What was tested too little."""
        size, found = self.size, []
        if self.parity_positions < size.min_positions:
            found.append(f"{self.parity_positions} positions compared, {size.min_positions} needed")
        for name in self.setup["proposers"]:
            for counter, least in (
                ("verified", size.min_verified),
                ("accepted", size.min_accepted),
            ):
                count = self.total(counter, (name,))
                if count < least:
                    found.append(f"{count} drafts of {name} were {counter}, {least} needed")
        rejections = self.total("rejections")
        if rejections < size.min_rejections:
            found.append(f"{rejections} spans had a draft rejected, {size.min_rejections} needed")
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
            "sections": [section.to_json() for section in self.sections],
            "seconds": round(self.seconds, 1),
        }


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
        "proposers": list(subject.proposers),
        "probes": list(subject.probes),
    }
    certificate = Certificate(setup, size, noise)
    judge = Judge(subject, noise)
    if self_test:
        certificate.trials = run_self_test(judge, size, progress)
    for name in SECTIONS:
        certificate.sections.append(run_section(name, judge, size, progress))
    certificate.sections.append(run_offers(judge, size, progress))
    certificate.seconds = time.perf_counter() - started
    return certificate


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
