"""Two OpenAI-compatible servers, any engine: do they say the same, greedily?

Each server's own noise comes first: every prompt is asked alone and again with all others at once,
and how far logprobs move between the two bounds what counts as a tie. At a difference, both servers
must rate the two tokens within that bound; then both go on from the text of the second, so that
what follows a tie is compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from surefoot.certify.certificate import FAIL, INCONCLUSIVE, PASS
from surefoot.certify.openai_client import Completion, Server

MIN_POSITIONS = 200
MARGIN = 2.0
FLOOR = 1e-4
"""Servers print logprobs rounded."""
CONCURRENCY = 8
MAX_TIES = 32
"""Per prompt: with more, the texts have nothing to do with each other."""


@dataclass(frozen=True)
class Mismatch:
    """``regrets``: how much less each server rates the other one's token than its own; None where
    it does not tell."""

    prompt: int
    position: int
    context: str
    left: str
    right: str
    regrets: tuple[float | None, float | None]
    bound: float

    @property
    def known(self) -> bool:
        return None not in self.regrets

    @property
    def tie(self) -> bool:
        return all(regret is not None and regret <= self.bound for regret in self.regrets)

    def to_json(self) -> dict[str, Any]:
        # JSON knows no infinity: a token outside the top list.
        regrets = ["inf" if regret == float("inf") else regret for regret in self.regrets]
        return {**vars(self), "regrets": regrets, "tie": self.tie}


@dataclass
class Comparison:
    urls: tuple[str, str]
    models: tuple[str, str]
    logprobs: bool = True
    noise: tuple[float, float] = (0.0, 0.0)
    bound: float = 0.0
    prompts: int = 0
    positions: int = 0
    largest_logprob_error: float = 0.0
    ties: list[Mismatch] = field(default_factory=list)
    divergences: list[Mismatch] = field(default_factory=list)
    unexplained: list[Mismatch] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def disproofs(self) -> list[str]:
        return [
            *(
                f"prompt {m.prompt}, position {m.position}: {m.left!r} against {m.right!r}, "
                f"regrets {m.regrets[0]:.3g} and {m.regrets[1]:.3g}, bound {m.bound:.3g}"
                for m in self.divergences
            ),
            *self.problems,
        ]

    @property
    def gaps(self) -> list[str]:
        found = [
            f"prompt {m.prompt}, position {m.position}: {m.left!r} against {m.right!r}; without "
            "logprobs of both tokens from both servers it may be a tie or not"
            for m in self.unexplained
        ]
        if self.positions < MIN_POSITIONS:
            found.append(f"{self.positions} positions compared, {MIN_POSITIONS} needed")
        return found

    @property
    def reasons(self) -> list[str]:
        return [*self.disproofs, *self.gaps]

    @property
    def result(self) -> str:
        if self.disproofs:
            return FAIL
        return INCONCLUSIVE if self.gaps else PASS

    def to_json(self) -> dict[str, Any]:
        values = dict(vars(self))
        for name in ("ties", "divergences", "unexplained"):
            values[name] = [item.to_json() for item in values[name]]
        thresholds = {"min_positions": MIN_POSITIONS}
        return {"result": self.result, "reasons": self.reasons, "thresholds": thresholds, **values}


def compare_servers(
    servers: tuple[Server, Server],
    prompts: Sequence[str],
    max_tokens: int,
    progress: Callable[[str, int, int], None],
) -> Comparison:
    """Ask both servers everything and compare. Raises SurefootError where one cannot be used."""
    left, right = servers
    result = Comparison((left.url, right.url), (left.model, right.model), prompts=len(prompts))
    alone = []
    for number, server in enumerate(servers):
        answers = []
        for index, prompt in enumerate(prompts):
            progress(f"server {'AB'[number]}", index, len(prompts))
            answers.append(server.complete(prompt, max_tokens))
        progress(f"server {'AB'[number]}", len(prompts), len(prompts))
        alone.append(answers)
    noise = tuple(
        _own_noise(server, prompts, max_tokens, answers)
        for server, answers in zip(servers, alone, strict=True)
    )
    result.logprobs = left.gives_logprobs and right.gives_logprobs
    result.noise = noise[0], noise[1]
    result.bound = MARGIN * max(noise) + FLOOR
    for index, prompt in enumerate(prompts):
        progress("comparing", index, len(prompts))
        _compare_prompt(
            result, servers, index, prompt, max_tokens, alone[0][index], alone[1][index]
        )
    progress("comparing", len(prompts), len(prompts))
    return result


def _own_noise(
    server: Server, prompts: Sequence[str], max_tokens: int, alone: Sequence[Completion]
) -> float:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt, max_tokens), prompts))
    moved = 0.0
    for first, second in zip(alone, together, strict=True):
        for at in range(min(len(first.logprobs), len(second.logprobs))):
            if first.tokens[at] != second.tokens[at]:
                # The server's own tie: its gap is part of its noise.
                moved = max(moved, _gap(first, at, second.tokens[at]) or 0.0)
                break
            moved = max(moved, abs(first.logprobs[at] - second.logprobs[at]))
    return 0.0 if moved == float("inf") else moved


def _compare_prompt(
    result: Comparison,
    servers: tuple[Server, Server],
    index: int,
    prompt: str,
    max_tokens: int,
    left: Completion,
    right: Completion,
) -> None:
    base, room = 0, max_tokens
    for _ in range(MAX_TIES):
        at = _first_difference(left.pieces, right.pieces)
        agreed = min(len(left.pieces), len(right.pieces)) if at is None else at
        result.positions += agreed
        _compare_logprobs(result, index, base, left, right, agreed)
        if at is None:
            _compare_ends(result, index, left, right)
            return
        mismatch = Mismatch(
            prompt=index,
            position=base + at,
            context=(prompt + "".join(left.pieces[:at]))[-200:],
            left=left.pieces[at],
            right=right.pieces[at],
            regrets=(_gap(left, at, right.pieces[at]), _gap(right, at, left.pieces[at])),
            bound=result.bound,
        )
        result.positions += 1
        if not mismatch.tie:
            (result.divergences if mismatch.known else result.unexplained).append(mismatch)
            return
        result.ties.append(mismatch)
        # Goes on from the second server's text, up to and including the differing token.
        prompt += "".join(right.pieces[: at + 1])
        base, room = base + at + 1, room - at - 1
        if room < 1:
            return
        left, right = (server.complete(prompt, room) for server in servers)
    result.problems.append(f"prompt {index}: more than {MAX_TIES} ties")


def _compare_ends(result: Comparison, index: int, left: Completion, right: Completion) -> None:
    if len(left.pieces) != len(right.pieces):
        result.problems.append(
            f"prompt {index}: one text goes on where the other ends "
            f"({len(left.pieces)} and {len(right.pieces)} pieces)"
        )
    elif left.finish != right.finish:
        result.problems.append(f"prompt {index}: ends by {left.finish} and by {right.finish}")


def _compare_logprobs(
    result: Comparison, index: int, base: int, left: Completion, right: Completion, count: int
) -> None:
    for at in range(min(count, len(left.logprobs), len(right.logprobs))):
        error = abs(left.logprobs[at] - right.logprobs[at])
        result.largest_logprob_error = max(result.largest_logprob_error, error)
        if error > result.bound:
            result.problems.append(
                f"prompt {index}, position {base + at}: logprobs {left.logprobs[at]:.5g} and "
                f"{right.logprobs[at]:.5g} of the same token, bound {result.bound:.3g}"
            )
            return


def _first_difference(left: Sequence[str], right: Sequence[str]) -> int | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None


def _gap(completion: Completion, at: int, other: str) -> float | None:
    """How much less the server rates ``other`` than its own token; infinite for a token outside
    its top list, None without one."""
    if at >= len(completion.top) or not completion.top[at]:
        return None
    rated = completion.top[at].get(other)
    return float("inf") if rated is None else max(0.0, completion.logprobs[at] - rated)
