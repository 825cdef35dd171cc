"""How good a drafter is, from held-out documents alone and in the engine.

A greedy document is what the engine would write, so rounds can be walked through on paper: from the
current token as many drafts are accepted as equal the document, the target adds one token, and the
next round begins there. That is the accepted length to the letter, without running rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surefoot.train.corpus import Batch
from surefoot.train.recipe import Drafted

USUAL_DEPTH = 4


@dataclass
class Walk:
    """Rounds with chains of ``depth`` drafts."""

    depth: int
    rounds: int = 0
    tokens: int = 0
    possible: list[int] = field(default_factory=list)
    """By length: rounds in which so many drafts and the document's end were not beyond."""
    reached: list[int] = field(default_factory=list)
    """By length: those of them in which so many drafts were accepted."""

    def __post_init__(self) -> None:
        self.possible, self.reached = [0] * self.depth, [0] * self.depth

    @property
    def accepted_length(self) -> float:
        """Tokens per round, the target's own included."""
        return self.tokens / max(1, self.rounds)

    @property
    def survival(self) -> list[float]:
        """Share of rounds in which draft j and all before it are accepted."""
        return [a / max(1, b) for a, b in zip(self.reached, self.possible, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """Share of the rounds that accepted the drafts before it in which draft j is accepted."""
        before = [1.0, *self.survival[:-1]]
        return [now / max(old, 1e-9) for now, old in zip(self.survival, before, strict=True)]

    def span(self, drafts: np.ndarray, text: np.ndarray) -> None:
        """Walk through ``text`` int64 [R + 1], a current token and what follows it; ``drafts``
        [R, depth]: the chains after each."""
        at = 0
        while (left := len(text) - 1 - at) > 0:
            wanted = text[at + 1 : at + 1 + self.depth]
            equal = drafts[at, : len(wanted)] == wanted
            accepted = len(wanted) if equal.all() else int(equal.argmin())
            for index in range(min(self.depth, left)):
                self.possible[index] += 1
                self.reached[index] += accepted > index
            self.rounds += 1
            self.tokens += min(accepted + 1, left)
            at += min(accepted + 1, left)


class Measurement:
    """Adds up over batches of held-out documents."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.walks = {count: Walk(count) for count in sorted({min(USUAL_DEPTH, depth), depth})}
        self.alone = Walk(depth)
        """Of drafts that know nothing of each other."""
        self.rows = self.agreed = 0
        self.sampled = 0.0
        self.marginal = np.zeros(depth)
        self.judged = np.zeros(depth)
        self.confidence: list[tuple[float, float]] = []
        self.greedy_tokens = self.greedy_equal = 0
        self.all_tokens = self.all_equal = 0

    def add(self, batch: Batch, drafted: Drafted) -> None:
        ids = batch.ids.cpu().numpy()
        rows = batch.pairs.nonzero()[0]
        self.rows += len(rows)
        self.agreed += int((drafted.tokens[rows, 0] == drafted.best[rows + 1]).sum())
        self.sampled += float(np.cumprod(drafted.overlap[rows], axis=1).sum())
        self.marginal += drafted.overlap.sum(axis=0)
        self.judged += (drafted.tokens >= 0).sum(axis=0)
        if drafted.confidence is not None:
            judged = drafted.tokens >= 0
            pairs = drafted.confidence[judged].tolist(), drafted.overlap[judged].tolist()
            self.confidence += zip(*pairs, strict=True)
        told = (drafted.best >= 0).nonzero()[0]
        equal = drafted.best[told] == ids[told + 1]
        greedy = (batch.temperature == 0)[batch.document_of[told]]
        self.all_tokens += len(told)
        self.all_equal += int(equal.sum())
        self.greedy_tokens += int(greedy.sum())
        self.greedy_equal += int(equal[greedy].sum())
        for index, temperature in enumerate(batch.temperature):
            if temperature == 0:
                self._walk(batch, drafted, ids, index)

    def _walk(self, batch: Batch, drafted: Drafted, ids: np.ndarray, index: int) -> None:
        start, end = batch.starts[index], batch.starts[index + 1]
        for first, last in generated_runs(batch.generated[start:end]):
            if first == 0:
                continue
            text = ids[start + first : start + last]
            chains = drafted.tokens[start + first - 1 : start + last - 1]
            for walk in self.walks.values():
                walk.span(chains, text)
            if drafted.alone is not None:
                self.alone.span(drafted.alone[start + first - 1 : start + last - 1], text)

    def results(self) -> dict[str, Any]:
        """JSON-ready. ``accepted_length`` by the number of drafts, ``survival`` and
        ``conditional`` by draft: of greedy documents, empty without any;
        ``sampled_length``: expected with the best possible coupling at temperature 1, over all
        rows; ``marginal``: mean overlap of the distributions after true tokens; ``confidence``:
        means of the chances that the drafter gives itself at temperature 1, of what they turn out
        to be, and of how far they are apart; ``without_markov``: the accepted length at full depth
        if no draft knew of the one before it, where some do; ``agreement``: of the first draft with
        the target's likeliest token; ``on_policy``: share of tokens, in greedy documents and in
        all, that are the target's likeliest."""
        deepest = self.walks[self.depth]
        walks = self.walks if deepest.rounds else {}
        return {
            "accepted_length": {str(count): walk.accepted_length for count, walk in walks.items()},
            "survival": deepest.survival if walks else [],
            "conditional": deepest.conditional if walks else [],
            "marginal": (self.marginal / np.maximum(self.judged, 1)).tolist(),
            "sampled_length": 1 + self.sampled / max(1, self.rows),
            "agreement": self.agreed / max(1, self.rows),
            "on_policy": {
                "greedy": self.greedy_equal / self.greedy_tokens if self.greedy_tokens else None,
                "all": self.all_equal / max(1, self.all_tokens),
            },
            "confidence": self._confidence(),
            "without_markov": self.alone.accepted_length if self.alone.rounds else None,
            "greedy_tokens": deepest.tokens,
            "rows": self.rows,
        }

    def _confidence(self) -> dict[str, float] | None:
        if not self.confidence:
            return None
        told, found = np.array(self.confidence).T
        apart = float(np.abs(told - found).mean())
        return {"told": float(told.mean()), "found": float(found.mean()), "apart": apart}


def generated_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Where True begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def score(results: dict[str, Any]) -> float:
    """What the best weights are chosen by: the greedy accepted length at full depth, or the
    sampled one where there are no greedy documents."""
    if not results["greedy_tokens"]:
        return results["sampled_length"]
    return list(results["accepted_length"].values())[-1]


def measure(
    draft: Callable[[Batch], Drafted], batches: Iterable[Batch], depth: int
) -> dict[str, Any]:
    found = Measurement(depth)
    for batch in batches:
        found.add(batch, draft(batch))
    return found.results()


def engine_length(
    options: dict[str, Any],
    proposer: str,
    path: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    depth: int,
) -> float:
    """Accepted length of the engine's own rounds, chains of ``depth`` drafts always verified, on
    greedy answers of up to ``max_tokens`` tokens. ``options``: of the engine."""
    from surefoot import LLM, SamplingParams

    llm = LLM(
        **options,
        proposers=(f"{proposer}={path}",),
        max_draft_tokens=depth,
        draft_policy="fixed",
        generation_config="none",
    )
    params = [SamplingParams(temperature=0, max_tokens=most) for most in max_tokens]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    tokens = rounds = 0
    for output in outputs:
        # The first token is the prompt's round's.
        tokens += len(output.outputs[0].token_ids) - 1
        rounds += output.outputs[0].speculation.rounds - 1
    return tokens / max(1, rounds)
