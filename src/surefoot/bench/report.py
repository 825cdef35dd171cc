"""From runs to numbers: medians, ratios with their spread, and whether the texts are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from surefoot.bench.measure import Measured, Pair, Run
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
class Summary:
    """A category, or all of them. Speeds are generated tokens per second from the medians of each
    batch; ``ratio`` is speculative over plain, ``ratio_low`` and ``ratio_high`` the lowest and
    highest ratio of any single pair of runs. ``decode_…`` leave the prefill out, and are None
    where all texts ended at their first token."""

    category: str
    prompts: int
    tokens: int
    plain_speed: float
    speculative_speed: float
    ratio: float
    ratio_low: float
    ratio_high: float
    decode_plain_speed: float | None
    decode_speculative_speed: float | None
    decode_ratio: float | None
    accepted_length: float
    """Tokens committed per round, the target's own included, over all speculative runs."""
    offered: int
    drafted: int
    accepted: int
    accepted_by_proposer: dict[str, int]
    differences: list[Difference]

    @property
    def identical(self) -> bool:
        return not self.differences


def summarise(results: Sequence[Measured], category: str = OVERALL) -> Summary:
    """Sum up the results of ``category``; ``overall`` takes all."""
    chosen = [item for item in results if category in (OVERALL, item.category)]
    pairs = [pair for item in chosen for pair in item.pairs]
    plain = [[pair.plain for pair in item.pairs] for item in chosen]
    speculative = [[pair.speculative for pair in item.pairs] for item in chosen]
    ratios = [_pair_ratio(pair) for pair in pairs]
    decode_plain, decode_speculative = _decode_speed(plain), _decode_speed(speculative)
    stats = [output.speculation for runs in speculative for run in runs for output in run.outputs]
    rounds = sum(item.rounds for item in stats)
    accepted = sum(item.accepted for item in stats)
    by_proposer: dict[str, int] = {}
    for item in stats:
        for name, count in item.accepted_by_proposer.items():
            by_proposer[name] = by_proposer.get(name, 0) + count
    return Summary(
        category=category,
        prompts=sum(len(item.prompts) for item in chosen),
        tokens=sum(runs[0].tokens for runs in plain),
        plain_speed=_speed(plain),
        speculative_speed=_speed(speculative),
        ratio=_speed(speculative) / _speed(plain),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        decode_plain_speed=decode_plain,
        decode_speculative_speed=decode_speculative,
        decode_ratio=decode_speculative / decode_plain
        if decode_speculative and decode_plain
        else None,
        accepted_length=(rounds + accepted) / rounds if rounds else 0.0,
        offered=sum(item.offered for item in stats),
        drafted=sum(item.drafted for item in stats),
        accepted=accepted,
        accepted_by_proposer=by_proposer,
        differences=[entry for item in chosen for entry in differences(item)],
    )


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
        {**asdict(item), "identical": item.identical} for item in summaries(results)
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


def _speed(batches: Sequence[Sequence[Run]]) -> float:
    """Tokens a second, each batch counted with its median tokens and seconds."""
    tokens = sum(median(run.tokens for run in runs) for runs in batches)
    return tokens / sum(median(run.seconds for run in runs) for runs in batches)


def _decode_speed(batches: Sequence[Sequence[Run]]) -> float | None:
    tokens = sum(median(run.decode_tokens for run in runs) for runs in batches)
    seconds = sum(median(run.decode_seconds for run in runs) for runs in batches)
    return tokens / seconds if tokens and seconds else None


def _pair_ratio(pair: Pair) -> float:
    plain, speculative = pair.plain, pair.speculative
    return (speculative.tokens / speculative.seconds) / (plain.tokens / plain.seconds)
