"""What a benchmark of traffic asks for, and when: prompts and outputs of many lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from surefoot.bench.prompts import BenchPrompt
from surefoot.errors import SurefootError

MEAN_PLACE = (5.9 - math.log(32)) / math.log(2048 / 32)
SPREAD = 0.8 / math.log(2048 / 32)
"""Where the mean of the lengths' logarithm lies between those of the shortest and the longest, and
its standard deviation as a part of the distance between these: a lognormal distribution with
parameters 5.9 and 0.8 for 32 to 2,048 tokens."""


@dataclass(frozen=True)
class Shape:
    """How many requests there are and what they look like. Lengths are (shortest, longest), in
    tokens. Prompts' lengths are lognormal, cut at both ends; outputs' are drawn evenly.
    ``rate``: mean arrivals a second, a Poisson process; None: whoever may send, sends at once."""

    requests: int = 256
    prompt_tokens: tuple[int, int] = (32, 2048)
    output_tokens: tuple[int, int] = (64, 448)
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise SurefootError("requests", f"{self.requests} is below 1")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise SurefootError("rate", f"{self.rate:g} is no rate", "use requests a second")


@dataclass(frozen=True)
class Call:
    """One request. ``prompt``: token ids, or a text or conversation for whoever tokenises it.
    ``due``: seconds after the start, not to be sent before."""

    prompt: Sequence[int] | BenchPrompt
    output_tokens: int
    seed: int
    due: float = 0.0


def draw_calls(
    shape: Shape,
    vocab_size: int = 0,
    prompts: Sequence[Sequence[int] | BenchPrompt] = (),
    variant: int = 0,
) -> list[Call]:
    """The same for the same arguments. Prompts are ``prompts`` in turn, or else random token ids
    below ``vocab_size``; ``variant`` changes these ids and nothing else."""
    lengths = random.Random(f"lengths {shape.seed}")
    asked = [draw_length(lengths, *shape.prompt_tokens) for _ in range(shape.requests)]
    outputs = random.Random(f"outputs {shape.seed}")
    tokens = random.Random(f"tokens {shape.seed} {variant}")
    texts = prompts or [tokens.choices(range(vocab_size), k=length) for length in asked]
    return [
        Call(
            prompt=texts[index % len(texts)],
            output_tokens=outputs.randint(*shape.output_tokens),
            seed=shape.seed + index,
            due=due,
        )
        for index, due in enumerate(arrivals(shape))
    ]


def draw_length(chooser: random.Random, shortest: int, longest: int) -> int:
    """Lognormal, cut at both ends."""
    low, high = math.log(shortest), math.log(longest)
    length = chooser.lognormvariate(low + MEAN_PLACE * (high - low), SPREAD * (high - low))
    return min(max(round(length), shortest), longest)


def arrivals(shape: Shape) -> list[float]:
    """When requests arrive, in seconds: all at 0 without a rate, else after gaps that are
    exponentially distributed and scaled so that the last comes at ``requests / rate``. (So does
    ``vllm bench serve``: the rate is the same, whatever the seed.)"""
    if shape.rate is None:
        return [0.0] * shape.requests
    chooser = random.Random(f"arrivals {shape.seed}")
    times = list(accumulate(chooser.expovariate(1.0) for _ in range(shape.requests)))
    return [shape.requests / shape.rate * time / times[-1] for time in times]
