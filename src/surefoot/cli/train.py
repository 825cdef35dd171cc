"""``surefoot train``: texts by the target, and drafters trained on them."""

from __future__ import annotations

import gc
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from surefoot.cli.terminal import load, progress_bars
from surefoot.cli.verb import verb
from surefoot.config import DEFAULT_MODEL, EngineConfig
from surefoot.errors import SurefootError
from surefoot.train.options import TrainOptions
from surefoot.train.registry import KINDS, Kind

if TYPE_CHECKING:
    from surefoot.train.generate import Asked
    from surefoot.train.run import EngineCheck

_FAR = 0.03
"""Relative difference between the accepted length in the engine and offline that is told."""
app = typer.Typer(
    help="Train drafters for a model: first `data`, then a kind of drafter.", no_args_is_help=True
)


_Minutes = Annotated[
    float | None,
    typer.Option(help="Stop after about so long; go on later.", show_default=False),
]


def target_group(
    target: Annotated[
        str, typer.Option(help="The model, as for `surefoot generate`.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32 or bfloat16. (default: auto)", show_default=False),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="auto, native, triton or torch. (default: auto)", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. (default: cpu)", show_default=False)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads. (default: one per core)", show_default=False)
    ] = None,
) -> dict[str, Any]:
    """Fields of ``EngineConfig``, those that were given."""
    values = {
        "model": target,
        "dtype": dtype,
        "backend": backend,
        "device": device,
        "threads": threads,
    }
    given = {name: value for name, value in values.items() if value is not None}
    EngineConfig.from_dict(given)
    return given


@app.command()
@verb(engine=target_group)
def data(
    engine: dict[str, Any],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the token shards.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines as for `surefoot bench`. Without it the target writes the prompts, "
            "too, from its chat template.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Generated tokens to reach.")] = 1_000_000,
    shard_prompts: Annotated[
        int, typer.Option(help="Prompts answered in one batch, into one file.")
    ] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    max_prompt: Annotated[int, typer.Option(help="Leave out longer prompts, in tokens.")] = 1024,
    min_tokens: Annotated[int, typer.Option(help="Leave out shorter answers.")] = 14,
    greedy: Annotated[float, typer.Option(help="Share of answers at temperature 0.")] = 0.5,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="Of the other answers (repeatable). (default: 0.7 and 1.0)", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one gives other texts.")] = 0,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at once. (default: 32; 512 on a GPU)", show_default=False
        ),
    ] = None,
    minutes: _Minutes = None,
) -> None:
    """Let the target answer prompts, and keep the tokens to train on.

    Answers that loop, that are short, or that were there before are left out. The same command
    goes on where one was ended, and with more --tokens it adds to what is there.
    """
    from surefoot.train.generate import DataOptions, generate_data

    given = {"temperatures": tuple(temperature)} if temperature else {}
    options = DataOptions(
        tokens, shard_prompts, max_tokens, max_prompt, min_tokens, greedy, seed=seed, **given
    )
    asked = None if prompts is None else read_asked(prompts)
    at_once = 512 if engine.get("device", "cpu").startswith("cuda") else 32
    llm = load(
        {**engine, "max_num_seqs": max_num_seqs or at_once},
        proposers=(),
        generation_config="none",
    )
    with progress_bars() as progress:
        summary = generate_data(llm, out, options, asked, progress, _seconds(minutes))
    dropped = ", ".join(f"{count} {reason}" for reason, count in summary.dropped.items())
    print(
        f"{out}: {summary.documents} documents in {summary.shards} shards, "
        f"{summary.generated_tokens} generated and {summary.prompt_tokens} prompt tokens, in "
        f"{summary.seconds:.0f} s; left out: {dropped or 'nothing'}"
    )
    if not summary.complete:
        print("not complete: the same command goes on", file=sys.stderr)
    elif summary.generated_tokens < tokens:
        print(f"all prompts are used, {tokens} tokens were not reached", file=sys.stderr)


def read_asked(path: Path) -> list[Asked]:
    """Prompts of a file; answers that it holds are left out."""
    from surefoot.bench.prompts import load_prompts
    from surefoot.train.filters import prompt_key
    from surefoot.train.generate import Asked

    asked = []
    for prompt in load_prompts(path):
        messages = list(prompt.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if prompt.text is None and not messages:
            raise SurefootError("prompts", f"{path}: {prompt.name} holds answers only")
        text = prompt.text if prompt.text is not None else str(messages)
        asked.append(Asked(text, prompt_key(text), messages or None))
    return asked


def options_group(kind: Kind) -> Callable[..., TrainOptions]:
    """A group (see ``verb``) with an option for each field of the kind's options."""
    made = kind.options_class()
    hints = get_type_hints(made)

    def group(**values: Any) -> TrainOptions:
        return made(**values)

    parameters = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=Annotated[
                hints[item.name],
                typer.Option(help=item.metadata["help"], show_default=item.default is not None),
            ],
        )
        for item in fields(made)
    ]
    group.__dict__["__signature__"] = inspect.Signature(parameters)
    return group


def _recipe_command(name: str, kind: Kind) -> None:
    @verb(engine=target_group, options=options_group(kind))
    def command(
        engine: dict[str, Any],
        options: TrainOptions,
        data: Annotated[
            Path, typer.Option(metavar="DIR", help="Token shards of `surefoot train data`.")
        ],
        out: Annotated[Path, typer.Option(metavar="DIR", help="The drafter's folder.")],
        certify: Annotated[
            bool, typer.Option("--certify/--no-certify", help="Certify it at the end.")
        ] = True,
        minutes: _Minutes = None,
    ) -> None:
        train_drafter(name, engine, options, data, out, certify, minutes)

    command.__doc__ = f"""Train a drafter of the kind {kind.label} on what the target wrote.

    Ends with the drafter in --out, a README.md with what was measured, and its files in
    --out/training. The same command goes on where one was ended. Under torchrun, with
    --device cuda, each process takes a GPU.
    """
    app.command(name)(command)


for _name, _kind in KINDS.items():
    _recipe_command(_name, _kind)


def train_drafter(
    name: str,
    engine: dict[str, Any],
    options: TrainOptions,
    data: Path,
    out: Path,
    certify: bool,
    minutes: float | None,
) -> None:
    """Train, export, measure in the engine, certify; exit code 1 if the certificate fails."""
    from surefoot.train.parallel import device_of, workers
    from surefoot.train.run import train, write_card

    engine = {**engine, "device": device_of(engine.get("device", "cpu"))}
    with workers(engine["device"]) as own, progress_bars() as progress:
        trained = train(name, engine, data, out, options, own, _say, progress, _seconds(minutes))
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
    if trained.check is not None:
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


def _seconds(minutes: float | None) -> float:
    return math.inf if minutes is None else 60 * minutes
