"""The three kinds of ``surefoot bench``, which options belong to which, and how those that several
share are read."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.config import MOST_DRAFTS
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.bench.subject import Subject
    from surefoot.bench.sweep import Mode
    from surefoot.engine.engine import Engine

DEFAULT_DRAFTS = 4
COMPARISON = "comparisons of texts"
SWEEP = "sweeps over --concurrency"
TRAFFIC = "--traffic"
KINDS: dict[str, tuple[str, ...]] = {
    "batch_size": (COMPARISON,),
    "show_drafts": (COMPARISON,),
    "prefix_caching": (COMPARISON,),
    "dummy_weights": (SWEEP, TRAFFIC),
    "synthetic_acceptance": (SWEEP, TRAFFIC),
    "modes": (SWEEP, TRAFFIC),
    "prompt_tokens": (SWEEP, TRAFFIC),
    "parts": (SWEEP,),
    "plot": (SWEEP,),
    "requests": (TRAFFIC,),
    "at_once": (TRAFFIC,),
    "rate": (TRAFFIC,),
    "url": (TRAFFIC,),
    "vocab_size": (TRAFFIC,),
}
"""Who has an option that not all have."""


def choose_kind(given: Mapping[str, Any]) -> str:
    """Which kind of benchmark these parameters of ``surefoot bench`` ask for. Refuses options that
    it lacks; those not given are None or False."""
    kind = SWEEP if given["concurrency"] is not None else COMPARISON
    if given["traffic"]:
        if kind == SWEEP:
            raise SurefootError("concurrency", "does not go with --traffic", "use --at-once")
        kind = TRAFFIC
    for name, kinds in KINDS.items():
        if given[name] not in (None, False) and kind not in kinds:
            owners = " and ".join(kinds)
            raise SurefootError(name, f"is for {owners} only", "drop it, or ask for that")
    if kind == COMPARISON:
        return kind
    if given["speculation"] != "auto":
        raise SurefootError("speculation", f"is not for {kind}", "use --modes")
    if "draft_policy" in given["engine"]:
        raise SurefootError("draft_policy", f"is not for {kind}", "use --modes")
    _check_prompts(given)
    return kind


def _check_prompts(given: Mapping[str, Any]) -> None:
    if given["prompts"] is None:
        for name in ("categories", "per_category"):
            if given[name] is not None:
                raise SurefootError(name, "chooses among --prompts", "give that too")
        return
    for name, why in (
        ("dummy_weights", "have no tokenizer"),
        ("prompt_tokens", "is for random prompts"),
        ("vocab_size", "is for random prompts"),
    ):
        if given[name] is not None:
            raise SurefootError(name, f"{why}: does not go with --prompts", "drop one of them")


def read_range(option: str, text: str | None, default: tuple[int, int]) -> tuple[int, int]:
    """``64-448``, or ``64`` for both."""
    if text is None:
        return default
    words = text.split("-")
    low, high = read_counts(option, words if len(words) == 2 else [text, text], " or LOW-HIGH")
    if low > high:
        raise SurefootError(option, f"{text!r} goes down", "use LOW-HIGH")
    return low, high


def read_count(option: str, text: str | None, default: int) -> int:
    """A single count."""
    return default if text is None else read_counts(option, [text])[0]


def read_modes(text: str | None, most_drafts: int | None) -> tuple[Mode, ...]:
    """``plain,1,2,auto``; without them plain, a fixed number of drafts, and auto."""
    if text is None:
        fixed = min(DEFAULT_DRAFTS, DEFAULT_DRAFTS if most_drafts is None else most_drafts)
        return tuple(dict.fromkeys((0, fixed, "auto"))) if fixed else (0,)
    modes: list[Mode] = []
    for word in (word.strip() for word in text.split(",")):
        if word in ("plain", "auto"):
            modes.append(0 if word == "plain" else "auto")
        else:
            modes += read_counts("modes", [word], ", plain or auto")
    if (most := max((mode for mode in modes if isinstance(mode, int)), default=0)) > MOST_DRAFTS:
        problem = f"{most} drafts of a request are more than the {MOST_DRAFTS} of a round"
        raise SurefootError("modes", problem, "ask for fewer")
    return tuple(dict.fromkeys(modes))


def read_rates(text: str | None) -> tuple[float, ...]:
    """``0.4,0.2``: the share of rounds in which drafts 1, 2, … are accepted."""
    try:
        rates = tuple(float(word) for word in text.split(",")) if text is not None else ()
    except ValueError:
        rates = (-1.0,)
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    if not falling or not all(0 <= rate <= 1 for rate in rates):
        raise SurefootError(
            "synthetic_acceptance",
            f"{text!r} are no unconditional rates",
            "use numbers from 0 to 1 that never rise: draft 2 needs draft 1",
        )
    return rates


def read_counts(option: str, words: Sequence[str], others: str = "") -> list[int]:
    """Whole numbers from 1; ``others`` is what else the option takes."""
    try:
        counts = [int(word) for word in words]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise SurefootError(
            option, f"{','.join(words)!r} is no count", f"use numbers from 1{others}"
        )
    return counts


def most_drafts(rates: Sequence[float], modes: Sequence[Mode]) -> int:
    """The drafts that an engine has to allow for these."""
    longest = max([len(rates), *(mode for mode in modes if isinstance(mode, int))])
    return longest or DEFAULT_DRAFTS


def introduce(engine: Engine, subject: Subject) -> None:
    """What was built, and the limits that hold, on stderr."""
    from surefoot.bench.subject import kind_of_rounds, title

    print(
        f"{title(engine, subject)}; up to {engine.config.max_num_seqs} requests at once, "
        f"KV cache for {engine.kv_tokens} tokens; decoding rounds {kind_of_rounds(engine)}",
        file=sys.stderr,
    )
    for line in engine.memory.lines() if engine.memory else ():
        print(f"  {line}", file=sys.stderr)
