"""Training a drafter from the command line: train, export, measure in the engine, certify."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from surefoot.cli.terminal import progress_bars
from surefoot.config import EngineConfig
from surefoot.train.options import TrainOptions
from surefoot.train.registry import KINDS

if TYPE_CHECKING:
    from surefoot.train.run import EngineCheck

_FAR = 0.03
"""Relative difference between the accepted length in the engine and offline that is told."""


def train_drafter(
    name: str,
    engine: dict[str, Any],
    options: TrainOptions,
    data: list[Path],
    out: Path,
    check: bool,
    certify: bool,
    seconds: float,
) -> None:
    """Train, export, measure in the engine, certify; exit code 1 if the certificate fails."""
    from surefoot.train.parallel import device_of, workers
    from surefoot.train.run import train, write_card

    engine = {**engine, "device": device_of(engine.get("device", "cpu"))}
    with workers(engine["device"]) as own, progress_bars() as progress:
        trained = train(name, engine, data, out, options, own, _say, progress, seconds)
        if not own.first:
            return
    if not trained.complete:
        _say("not complete: the same command goes on")
        return
    # The engine plans with the memory that is free.
    gc.collect()
    if engine["device"].startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
    facts, proposer = trained.facts, KINDS[name].proposer
    if check and trained.check is not None:
        facts["engine"] = _in_engine(engine, proposer, out, trained.check)
    write_card(out, facts)
    code = 0
    if certify:
        code = _certify(engine, proposer, out)
        facts["certificate"] = {0: "PASS", 1: "FAIL"}.get(code, "INCONCLUSIVE")
        write_card(out, facts)
    _say(f"{out} holds the drafter; see README.md there")
    if code == 1:
        raise typer.Exit(1)


def _in_engine(
    engine: dict[str, Any], proposer: str, out: Path, check: EngineCheck
) -> dict[str, Any]:
    """The accepted length of the engine's rounds beside the expected one."""
    from surefoot.train.measure import engine_length

    length = engine_length(engine, proposer, str(out), check.prompts, check.max_tokens, check.depth)
    _say(
        f"accepted length of {len(check.prompts)} greedy texts in the engine: {length:.3f}, "
        f"expected offline {check.offline:.3f}"
    )
    if abs(length - check.offline) > _FAR * check.offline:
        _say("these should be the same: look for a difference between training and inference")
    return {
        "depth": check.depth,
        "prompts": len(check.prompts),
        "length": length,
        "offline": check.offline,
    }


def _certify(engine: dict[str, Any], proposer: str, out: Path) -> int:
    from surefoot.cli.certifying import issue
    from surefoot.train.run import STATE_FOLDER

    folder = out / STATE_FOLDER
    subject = {**engine, "proposers": (f"{proposer}={out}",)}
    EngineConfig.from_dict(subject)
    return issue(
        subject, None, True, True, folder / "certificate.json", folder / "certificate.html"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
