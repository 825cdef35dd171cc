"""From runs to numbers: speeds, ratios with their spread, and whether the texts are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from surefoot.bench.measure import Measured, Run
from surefoot.bench.spread import Spread, spread
from surefoot.engine.output import CompletionOutput

OVERALL = "overall"


@dataclass(frozen=True)
class Difference:
    """A run whose tokens are not those of the first plain run of the same prompt."""

    prompt: str
    way: str
    """``plain`` or ``speculative``."""
    repeat: int
    position: int
    """Index of the first token that differs."""


@dataclass(frozen=True)
class Total:
    """One way's runs of all batches in one pass, together. Speeds are tokens per second;
    ``decode_speed`` is None where all texts ended at their first token."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Total:
        listed = list(runs)
        return cls(
            tokens=sum(run.tokens for run in listed),
            seconds=sum(run.seconds for run in listed),
            decode_tokens=sum(run.decode_tokens for run in listed),
            decode_seconds=sum(run.decode_seconds for run in listed),
        )

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_speed(self) -> float | None:
        if not self.decode_tokens or not self.decode_seconds:
            return None
        return self.decode_tokens / self.decode_seconds


@dataclass(frozen=True)
class Summary:
    """A category, or all of them. Speeds are generated tokens per second, medians over the passes;
    ``ratio`` is the spread of the passes' ratios, speculative over plain. ``decode_…`` leave the
    prefill out, and are None where all texts ended at their first token. ``verified``: drafts that
    the target has checked, of those ``offered``; counts are over all speculative runs."""

    category: str
    prompts: int
    tokens: int
    plain_speed: float
    speculative_speed: float
    ratio: Spread
    decode_plain_speed: float | None
    decode_speculative_speed: float | None
    decode_ratio: Spread | None
    accepted_length: float
    """Tokens committed per round, the target's own included."""
    offered: int
    verified: int
    accepted: int
    accepted_by_proposer: dict[str, int]
    differences: list[Difference]

    @property
    def identical(self) -> bool:
        return not self.differences

    @property
    def verdict(self) -> str:
        """Whether speculation was faster, in a few words. Where no drafts were verified, both ways
        ran the model alike, and whatever the ratio, it is not for the drafts."""
        return self.ratio.verdict if self.verified else "no drafts verified"


def summarise(results: Sequence[Measured], category: str = OVERALL) -> Summary:
    """Sum up the results of ``category``; ``overall`` takes all. All have the same number of
    passes."""
    chosen = [item for item in results if category in (OVERALL, item.category)]
    passes = list(zip(*(item.pairs for item in chosen), strict=True))
    plain = [Total.of(pair.plain for pair in pairs) for pairs in passes]
    speculative = [Total.of(pair.speculative for pair in pairs) for pairs in passes]
    decode_plain, decode_speculative = _decode_speeds(plain), _decode_speeds(speculative)
    runs = [pair.speculative for pairs in passes for pair in pairs]
    stats = [output.speculation for run in runs for output in run.outputs]
    rounds = sum(item.rounds for item in stats)
    accepted = sum(item.accepted for item in stats)
    by_proposer: Counter[str] = Counter()
    for item in stats:
        by_proposer.update(item.accepted_by_proposer)
    return Summary(
        category=category,
        prompts=sum(len(item.prompts) for item in chosen),
        tokens=plain[0].tokens,
        plain_speed=median(total.speed for total in plain),
        speculative_speed=median(total.speed for total in speculative),
        ratio=spread([b.speed / a.speed for a, b in zip(plain, speculative, strict=True)]),
        decode_plain_speed=median(decode_plain) if decode_plain else None,
        decode_speculative_speed=median(decode_speculative) if decode_speculative else None,
        decode_ratio=spread([b / a for a, b in zip(decode_plain, decode_speculative, strict=True)])
        if decode_plain and decode_speculative
        else None,
        accepted_length=(rounds + accepted) / rounds if rounds else 0.0,
        offered=sum(item.offered for item in stats),
        verified=sum(item.verified for item in stats),
        accepted=accepted,
        accepted_by_proposer=dict(by_proposer),
        differences=[entry for item in chosen for entry in differences(item)],
    )


def _decode_speeds(totals: Sequence[Total]) -> list[float] | None:
    """One a pass; None unless all passes have one."""
    speeds = [total.decode_speed for total in totals]
    known = [speed for speed in speeds if speed is not None]
    return known if len(known) == len(speeds) else None


def summaries(results: Sequence[Measured]) -> list[Summary]:
    """One for each category, then the overall one."""
    categories = dict.fromkeys(item.category for item in results)
    return [summarise(results, category) for category in (*categories, OVERALL)]


def differences(measured: Measured) -> list[Difference]:
    """Runs whose text differs from the first plain run's; another plain run may be among them:
    then the baseline itself does not repeat."""
    found = []
    for index, prompt in enumerate(measured.prompts):
        expected = measured.pairs[0].plain.outputs[index]
        for repeat, pair in enumerate(measured.pairs):
            for way, run in (("plain", pair.plain), ("speculative", pair.speculative)):
                position = first_difference(expected, run.outputs[index])
                if position is not None:
                    found.append(Difference(prompt.name, way, repeat, position))
    return found


def first_difference(expected: CompletionOutput, got: CompletionOutput) -> int | None:
    """Index of the first token that differs, None when tokens, text and ending are the same."""
    if (expected.token_ids, expected.text, expected.finish_reason) == (
        got.token_ids,
        got.text,
        got.finish_reason,
    ):
        return None
    both = zip(expected.token_ids, got.token_ids, strict=False)
    shorter = min(len(expected.token_ids), len(got.token_ids))
    return next((index for index, (a, b) in enumerate(both) if a != b), shorter)


def to_json(results: Sequence[Measured]) -> dict[str, Any]:
    """Everything measured, JSON-ready."""
    *categories, overall = [
        {**asdict(item), "identical": item.identical, "verdict": item.verdict}
        for item in summaries(results)
    ]
    return {"overall": overall, "categories": categories, "batches": [_batch(x) for x in results]}


def _batch(measured: Measured) -> dict[str, Any]:
    def side(runs: list[Run]) -> dict[str, Any]:
        return {
            "tokens": [len(output.token_ids) for output in runs[0].outputs],
            "seconds": [run.seconds for run in runs],
            "decode_seconds": [run.decode_seconds for run in runs],
            "decode_tokens": [run.decode_tokens for run in runs],
        }

    return {
        "category": measured.category,
        "prompts": [prompt.name for prompt in measured.prompts],
        "plain": side([pair.plain for pair in measured.pairs]),
        "speculative": side([pair.speculative for pair in measured.pairs]),
    }
