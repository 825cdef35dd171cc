"""From a folder of shards to a drafter's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.train.baseline import successor_length
from surefoot.train.card import card
from surefoot.train.corpus import Corpus
from surefoot.train.curves import PICTURE, Curves, draw
from surefoot.train.measure import USUAL_DEPTH, generated_runs, measure
from surefoot.train.options import TrainOptions
from surefoot.train.parallel import Workers
from surefoot.train.recipe import Recipe
from surefoot.train.registry import KINDS
from surefoot.train.shards import SETTINGS, settle
from surefoot.train.target import Target, load_target
from surefoot.train.trainer import Outcome, Trainer

STATE_FOLDER = "training"
_FACTS = "facts.json"
_ENGINE_PROMPTS = 32
Report = Callable[[str], None]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EngineCheck:
    """Greedy held-out documents to be generated once more with the drafter: their prompts, the
    lengths of their answers, and the accepted length that the rounds are expected to have with
    chains of ``depth`` drafts."""

    prompts: list[list[int]]
    max_tokens: list[int]
    depth: int
    offline: float


@dataclass(frozen=True)
class Trained:
    """``complete`` False: time was over, and the same command goes on."""

    complete: bool
    facts: dict[str, Any]
    check: EngineCheck | None = None


def train(
    kind: str,
    engine: Mapping[str, Any],
    data: Sequence[Path],
    out: Path,
    options: TrainOptions,
    workers: Workers,
    report: Report,
    progress: Progress,
    seconds: float = math.inf,
) -> Trained:
    """Train, measure and export a drafter of one of ``KINDS`` for the model of ``engine`` (fields
    of ``EngineConfig``) on the texts of the folders ``data``. Only the first worker writes and
    reports."""
    if not workers.first:
        report, progress = lambda text: None, lambda label, done, total: None
    state = out / STATE_FOLDER
    config = EngineConfig.from_dict(engine)
    target = load_target(config, options.max_length, progress)
    corpus = Corpus(data, min(options.max_length, target.config.max_positions))
    made = [_data_facts(folder, target) for folder in data]
    if workers.first:
        settings = {"kind": kind, "target": target.name, "documents": len(corpus)}
        settings |= {"tokens": len(corpus.ids), **asdict(options)}
        settle(state, "options.json", settings, "out")
    recipe = KINDS[kind].recipe_class()(options, target, corpus)
    if options.init_from is not None:
        recipe.begin_from(options.init_from)
    report(
        f"{len(corpus)} documents, {int(corpus.generated.sum())} generated of {len(corpus.ids)} "
        "tokens; " + ", ".join(f"{name} {value}" for name, value in recipe.facts().items())
    )
    trainer = Trainer(recipe, state, workers, report, progress)
    outcome = trainer.run(seconds)
    if not outcome.complete or not workers.first:
        return Trained(outcome.complete, {})
    recipe.export(out)
    curves = Curves(state, outcome.steps)
    title = f"{KINDS[kind].label} for {target.name}"
    if not draw(curves, state / PICTURE, title):
        report("no picture of the curves: pip install 'surefoot[plot]'")
    facts = _facts(kind, recipe, trainer, outcome, options, made, curves)
    write_card(out, facts)
    return Trained(True, facts, _engine_check(recipe, trainer.held_out, options.batch_tokens))


def write_card(out: Path, facts: Mapping[str, Any]) -> None:
    """``README.md``, and the same as JSON among the run's files."""
    (out / "README.md").write_text(card(facts), encoding="utf-8")
    text = json.dumps(facts, indent=1) + "\n"
    (out / STATE_FOLDER / _FACTS).write_text(text, encoding="utf-8")


def finished(out: Path) -> dict[str, Any] | None:
    """The facts of a drafter that was exported there; None if none was."""
    path = out / STATE_FOLDER / _FACTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _data_facts(data: Path, target: Target) -> dict[str, Any]:
    try:
        made = json.loads((data / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SurefootError(
            "data", f"{data} is no folder of token shards: {error}", "run `surefoot train data`"
        ) from None
    if made["vocab_size"] != target.config.vocab_size:
        raise SurefootError(
            "data",
            f"was written by a model of {made['vocab_size']} tokens ({made['target']}), and the "
            f"target has {target.config.vocab_size}",
        )
    return made


def _facts(
    kind: str,
    recipe: Recipe,
    trainer: Trainer,
    outcome: Outcome,
    options: TrainOptions,
    made: Sequence[Mapping[str, Any]],
    curves: Curves,
) -> dict[str, Any]:
    corpus = recipe.corpus
    return {
        "kind": kind,
        "label": KINDS[kind].label,
        "proposer": KINDS[kind].proposer,
        "target": recipe.target.name,
        "depth": recipe.depth,
        "successors": successor_length(
            corpus,
            trainer.plan.documents,
            trainer.held_out,
            recipe.target.config.vocab_size,
            min(USUAL_DEPTH, recipe.depth),
        ),
        "held_out": len(trainer.held_out),
        "results": outcome.results,
        "trained": {
            **recipe.facts(),
            "documents": len(corpus),
            "generated_tokens": int(corpus.generated.sum()),
            "tokens_seen": outcome.tokens,
            "steps": outcome.steps,
            "weights_of_step": outcome.best_step,
            "seconds": round(outcome.seconds, 1),
            **speeds(curves),
            "texts": "; ".join(dict.fromkeys(map(_origin, made))),
            **{name: value for name, value in asdict(options).items() if value is not None},
        },
    }


def speeds(curves: Curves) -> dict[str, float]:
    """Medians of what ``Meter.speeds`` told, and the most memory."""
    found: dict[str, float] = {}
    for name in ("tokens_per_s", "tflops", "share_of_arithmetic", "peak_gb"):
        if values := [value for value in curves.of(name)[1] if value is not None]:
            found[name] = max(values) if name == "peak_gb" else float(np.median(values))
    return found


def _origin(made: Mapping[str, Any]) -> str:
    given = made["prompts"]
    prompts = "its own prompts" if given is None else f"{given['count']} prompts"
    return f"by {made['target']} in {made['dtype']}, {prompts}"


def _engine_check(recipe: Recipe, held_out: np.ndarray, tokens: int) -> EngineCheck | None:
    corpus, depth = recipe.corpus, min(USUAL_DEPTH, recipe.depth)
    chosen, prompts, most = [], [], []
    for document in held_out[corpus.temperature[held_out] == 0]:
        piece = slice(corpus.starts[document], corpus.starts[document + 1])
        runs = generated_runs(corpus.generated[piece])
        if len(runs) == 1 and len(chosen) < _ENGINE_PROMPTS:
            chosen.append(int(document))
            prompts.append(corpus.ids[piece][: runs[0][0]].tolist())
            most.append(runs[0][1] - runs[0][0])
    if not chosen:
        return None
    packs = corpus.pack(chosen, tokens)
    batches = (corpus.batch(pack, recipe.target.device) for pack in packs)
    results = measure(recipe.draft, batches, recipe.depth)
    return EngineCheck(prompts, most, depth, results["accepted_length"][str(depth)])
