"""The loop that all kinds of drafters share."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.train.corpus import Corpus, Plan
from surefoot.train.curves import Curves
from surefoot.train.measure import measure, score
from surefoot.train.meter import Meter
from surefoot.train.parallel import Workers
from surefoot.train.recipe import Recipe
from surefoot.train.saving import BEST, STATE, read, save

_LOG_EVERY = 20
"""Steps between two entries of the curves: reading numbers waits for the device."""
_LOWEST_RATE = 0.05
"""Of the learning rate, at the end."""
_CLIP = 1.0
_KEPT = ("step", "tokens", "best", "best_step", "seconds")
Report = Callable[[str], None]
Progress = Callable[[str, int, int], None]


@dataclass
class Outcome:
    """``complete``: all steps were made. ``results``: of ``measure``, for the weights that the
    network now has, those of ``best_step``."""

    complete: bool
    steps: int
    best_step: int
    tokens: int
    seconds: float
    results: dict[str, Any]


class Trainer:
    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        workers: Workers,
        report: Report,
        progress: Progress,
    ) -> None:
        """``folder``: of the run's state and curves."""
        self.recipe, self.options = recipe, recipe.options
        options = self.options
        self.folder, self.workers = folder, workers
        self.report, self.progress = report, progress
        corpus: Corpus = recipe.corpus
        documents, self.held_out = corpus.split(options.held_out, options.seed)
        micro = options.step_tokens // options.batch_tokens
        if micro % workers.count:
            raise SurefootError(
                "step_tokens",
                f"makes {micro} batches a step, which {workers.count} processes cannot share",
                "use a multiple of --batch-tokens times the number of processes",
            )
        self.plan = Plan(corpus, documents, options.batch_tokens, micro, options.seed)
        per_epoch = len(self.plan.epoch(0))
        self.limit = None if options.duration is None else 60 * options.duration
        """Seconds after which the run is complete, in place of ``steps``."""
        if self.limit is not None and workers.count > 1:
            raise SurefootError("duration", "is for one process", "use --epochs or --steps")
        self.steps = options.steps or max(1, round(options.epochs * per_epoch))
        self.per_epoch = per_epoch
        self.step = self.tokens = self.best_step = 0
        self.seconds = 0.0
        self.best = -math.inf
        self.device = recipe.target.device
        self.parameters = [v for v in recipe.network.parameters() if v.requires_grad]
        self.optimizer = torch.optim.AdamW(
            recipe.groups(options.learning_rate),
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, seconds: float = math.inf) -> Outcome:
        """Go on from the state in the folder, up to the last step or until ``seconds`` are over;
        then, if complete, give the network the best weights."""
        self._resume()
        curves = Curves(self.folder, self.step) if self.workers.first else None
        long = f"{self.steps} steps" if self.limit is None else f"{self.limit:.0f} s"
        self.report(
            f"{long}, {self.per_epoch} steps for each pass over the data; from step {self.step}"
        )
        started, before = time.monotonic(), self.seconds
        measured = saved = self.tokens
        if self.options.init_from is not None and self.step == 0:
            # They may be better than what comes of them.
            self._measure(curves)
        works = self.recipe.target.work, self.recipe.network.work
        meter = Meter(self.device, works, self.tokens)
        for packs in self.plan.steps(self.step, self.steps if self.limit is None else sys.maxsize):
            rate = self._set_rate()
            norm = self._step(packs, meter)
            self.seconds = before + time.monotonic() - started
            last, told = self._done() >= 1, self.step % _LOG_EVERY == 0
            if told or last:
                self._log(curves, meter, rate, float(norm))
            if last or self.tokens - measured >= self.options.measure_every:
                measured = self.tokens
                self._measure(curves)
                meter.start(self.tokens)
            # A process that ran out of time alone would leave the others waiting.
            late = time.monotonic() - started >= seconds
            stopped = told and not last and self._agree(late)
            if last or stopped or self.tokens - saved >= self.options.save_every:
                saved = self.tokens
                self._save()
            if stopped or last:
                break
        complete = self._done() >= 1
        results = self._take_best() if complete and self.workers.first else {}
        return Outcome(complete, self.step, self.best_step, self.tokens, self.seconds, results)

    def _step(self, packs: Sequence[Sequence[int]], meter: Meter) -> torch.Tensor:
        """One step of the optimizer; returns the gradients' norm."""
        meter.totals += self._train(packs)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        meter.steps += 1
        self.tokens += sum(self.recipe.corpus.length(item) for pack in packs for item in pack)
        if self.limit is None:
            self.progress("Training", self.step, self.steps)
        else:
            self.progress("Training", int(min(self.seconds, self.limit)), int(self.limit))
        return norm

    def _done(self) -> float:
        """How much of the run is over, 1 at its end."""
        return self.step / self.steps if self.limit is None else self.seconds / self.limit

    def _log(self, curves: Curves | None, meter: Meter, rate: float, norm: float) -> None:
        self.workers.add_up([meter.totals])
        loss, agreement = meter.read()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise SurefootError(
                "learning_rate", f"the loss is no number at step {self.step}", "lower it"
            )
        entry = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": loss,
            "agreement": agreement,
            "learning_rate": rate,
            "gradient_norm": norm,
            **meter.speeds(self.tokens),
        }
        if curves is not None:
            curves.add(entry)
        meter.start(self.tokens)

    def _train(self, packs: Sequence[Sequence[int]]) -> torch.Tensor:
        """Gradients of a step, added up over all processes; loss and counts of this one."""
        totals = torch.zeros(3, device=self.device)
        documents = [document for pack in packs for document in pack]
        divisor = self.recipe.divisor(documents, self.options.weighting)
        for pack in packs[self.workers.rank :: self.workers.count]:
            batch = self.recipe.corpus.batch(pack, self.device)
            loss, counts = self.recipe.loss(batch, divisor, self.step)
            loss.backward()
            totals += counts
        for value in self.parameters:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        self.workers.add_up([v.grad for v in self.parameters if v.grad is not None])
        return totals

    def _set_rate(self) -> float:
        """Linear warm-up, then a cosine; returns the first group's."""
        warm, done = self.options.warm_up, self._done()
        if done < warm:
            share = max(done / warm, _LOWEST_RATE)
        else:
            fallen = (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2
            share = _LOWEST_RATE + (1 - _LOWEST_RATE) * fallen
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        return self.rates[0] * share

    def _measure(self, curves: Curves | None) -> None:
        """On the held-out documents; keeps the weights if they are the best so far."""
        if curves is None:
            return
        results = self.results()
        found = score(results)
        curves.add(
            {
                "step": self.step,
                "tokens": self.tokens,
                "length": found,
                "held_out_agreement": results["agreement"],
                "held_out": results,
            }
        )
        lengths = ", ".join(
            f"{length:.2f} with {count} drafts"
            for count, length in results["accepted_length"].items()
        )
        lengths = lengths or "unknown (no greedy text is held out)"
        self.report(
            f"step {self.step}, {self.tokens / 1e6:.1f} M tokens: accepted length {lengths}; "
            f"{results['sampled_length']:.2f} at temperature 1; "
            f"first draft right {results['agreement']:.1%}"
        )
        if found > self.best:
            self.best, self.best_step = found, self.step
            network = self.recipe.network.state_dict()
            save(self.folder / BEST, {"network": network, "results": results})

    def results(self) -> dict[str, Any]:
        """``measure`` with the network's present weights."""
        corpus = self.recipe.corpus
        packs = corpus.pack(self.held_out, self.options.batch_tokens)
        batches = (corpus.batch(pack, self.device) for pack in packs)
        return measure(self.recipe.draft, batches, self.recipe.depth)

    def _take_best(self) -> dict[str, Any]:
        best = read(self.folder / BEST, self.device)
        assert best is not None, "the last step was measured"
        self.recipe.network.load_state_dict(best["network"])
        return best["results"]

    def _save(self) -> None:
        if self.workers.first:
            state = {name: getattr(self, name) for name in _KEPT}
            state |= {"network": self.recipe.network.state_dict()}
            save(self.folder / STATE, {**state, "optimizer": self.optimizer.state_dict()})

    def _resume(self) -> None:
        state = read(self.folder / STATE, self.device)
        if state is None:
            return
        self.recipe.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _KEPT:
            setattr(self, name, state[name])

    def _agree(self, late: bool) -> bool:
        return late if self.workers.count == 1 else self.workers.agree(late, self.device)
