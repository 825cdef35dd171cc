"""From the times at which tokens came to throughput and latencies, as ``vllm bench serve`` defines
them.

A *chunk* is what reaches the client in one piece: an event of a stream over HTTP, what a round gave
the request in process; with speculation that may be several tokens.

- TTFT, time to first token: from sending the request to its first chunk.
- ITL, inter-token latency: every gap between a request's chunk and the one before it.
- TPOT, time per output token: from the first chunk to the last, divided by the request's tokens
  less one; none for requests of one token.
- E2EL, end-to-end latency: from sending the request to its last chunk.
- Output throughput: all requests' tokens, divided by the time from the start to the last chunk.

Percentiles interpolate between neighbours (numpy's default).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Timeline:
    """One request: when it was sent and its chunks came, in seconds after the start. ``tokens`` of
    output and ``prompt_tokens``; ``error`` says why it failed."""

    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Latency:
    """Milliseconds; ``percentiles`` are those of ``PERCENTILES``."""

    mean: float
    percentiles: tuple[float, ...]
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray) -> Latency | None:
        """None of nothing."""
        if not len(seconds):
            return None
        values = 1000 * np.asarray(seconds)
        ranks = np.percentile(values, PERCENTILES)
        return cls(float(values.mean()), tuple(map(float, ranks)), float(values.max()))


@dataclass(frozen=True)
class Traffic:
    """What a run came to. ``last_first_token``: seconds from the start until every request had a
    token."""

    seconds: float
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    last_first_token: float
    ttft: Latency | None
    itl: Latency | None
    tpot: Latency | None
    e2el: Latency | None

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, float | int]:
        """JSON-ready, under the names of ``vllm bench serve``'s results where it has them."""
        seconds = self.seconds or float("inf")
        found: dict[str, float | int] = {
            "duration": self.seconds,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.completed / seconds,
            "output_throughput": self.output_throughput,
            "total_token_throughput": (self.prompt_tokens + self.output_tokens) / seconds,
            "last_first_token_s": self.last_first_token,
        }
        for name in ("ttft", "itl", "tpot", "e2el"):
            latency: Latency | None = getattr(self, name)
            if latency is None:
                continue
            found[f"mean_{name}_ms"] = latency.mean
            for rank, value in zip(PERCENTILES, latency.percentiles, strict=True):
                found[f"p{rank}_{name}_ms"] = value
            found[f"max_{name}_ms"] = latency.most
        return found


def summarise(timelines: Sequence[Timeline]) -> Traffic:
    """Sum up a run. Requests that failed count as such, and for nothing else."""
    done = [line for line in timelines if line.error is None and line.chunks]
    several = [line for line in done if line.tokens > 1]
    return Traffic(
        seconds=max((line.chunks[-1] for line in done), default=0.0),
        completed=len(done),
        failed=len(timelines) - len(done),
        prompt_tokens=sum(line.prompt_tokens for line in done),
        output_tokens=sum(line.tokens for line in done),
        last_first_token=max((line.chunks[0] for line in done), default=0.0),
        ttft=Latency.of([line.chunks[0] - line.sent for line in done]),
        itl=Latency.of(np.concatenate([np.diff(line.chunks) for line in done] or [np.empty(0)])),
        tpot=Latency.of([(x.chunks[-1] - x.chunks[0]) / (x.tokens - 1) for x in several]),
        e2el=Latency.of([line.chunks[-1] - line.sent for line in done]),
    )
