"""``surefoot train``: texts by the target, and drafters trained on them."""

from __future__ import annotations

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
    from surefoot.train.conversations import Asked

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
            help="JSON lines as for `surefoot bench`; the target answers every turn of the user's. "
            "Without it the target writes the prompts, too, from its chat template.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Generated tokens to reach.")] = 1_000_000,
    shard_prompts: Annotated[
        int, typer.Option(help="Prompts whose texts go into one file.")
    ] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    max_prompt: Annotated[int, typer.Option(help="Leave out longer prompts, in tokens.")] = 1024,
    min_tokens: Annotated[int, typer.Option(help="Leave out texts of fewer generated ones.")] = 14,
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
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of the GPU's memory to take, less for several processes at once. "
            "(default: 0.9)",
            show_default=False,
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
    sizes: dict[str, Any] = {"max_num_seqs": max_num_seqs or at_once}
    if gpu_memory_utilization is not None:
        sizes["gpu_memory_utilization"] = gpu_memory_utilization
    llm = load(
        {**engine, **sizes},
        proposers=(),
        # Without drafts there is nothing to choose from, and rounds need not be timed for it:
        # those that occur are recorded as they do.
        draft_policy="fixed",
        generation_config="none",
    )
    with progress_bars() as progress:
        summary = generate_data(llm, out, options, asked, progress, seconds_of(minutes))
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


@app.command()
@verb(engine=target_group)
def export(
    engine: dict[str, Any],
    drafter: Annotated[
        str,
        typer.Option(metavar="PATH", help="Folder or hub name of an EAGLE-3 or DSpark drafter."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The GGUF file, named *.gguf.")],
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Draft no more than so many tokens, the most frequent ones in --data: fewer are "
            "sooner weighed.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Token shards of `surefoot train data` (repeatable), for --draft-vocab.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        int, typer.Option(help="Of the layers' weights: 8, or 4 for still fewer bytes.")
    ] = 8,
) -> None:
    """Write a drafter as a GGUF file of 8-bit or 4-bit blocks: fewer bytes, so sooner on a CPU.

    In llama.cpp's layout, without the tokenizer. A head that is the target's is left out.
    """
    import numpy as np
    import torch

    from surefoot.speculation.drafting.folders import errors_about
    from surefoot.train.corpus import Corpus
    from surefoot.train.gguf import KINDS_BY_BITS, export_gguf
    from surefoot.train.target import load_target
    from surefoot.train.vocabulary import choose_vocabulary

    if out.suffix != ".gguf":
        raise SurefootError("out", f"{out} is not named *.gguf", "other names are not read as GGUF")
    if bits not in KINDS_BY_BITS:
        raise SurefootError("bits", f"there are no blocks of {bits} bits", "use 8 or 4")
    with progress_bars() as progress:
        target = load_target(EngineConfig.from_dict(engine), 1, progress)
    vocabulary, told = None, ""
    if (draft_vocab is None) != (not data):
        raise SurefootError("draft_vocab", "and --data go together", "give both or neither")
    if draft_vocab is not None and data:
        if draft_vocab < 1:
            raise SurefootError("draft_vocab", f"{draft_vocab} is below 1")
        corpus, size = Corpus(data, target.config.max_positions), target.config.vocab_size
        ids, share = choose_vocabulary(corpus, np.arange(len(corpus)), size, draft_vocab)
        vocabulary, told = torch.from_numpy(ids), f"; these tokens are {share:.1%} of the texts"
    with errors_about("drafter"):
        shared = export_gguf(drafter, out, target, vocabulary, bits)
    head = "; the head is the target's" if shared else ""
    print(f"{out}: {out.stat().st_size} bytes{head}{told}")


def read_asked(path: Path) -> list[Asked]:
    """Prompts of a file. The target answers every turn of the user's; answers that the file holds
    are left out."""
    from surefoot.bench.prompts import load_prompts
    from surefoot.train.conversations import Asked
    from surefoot.train.filters import prompt_key

    asked = []
    for prompt in load_prompts(path):
        if prompt.text is not None:
            asked.append(Asked(prompt.text, prompt_key(prompt.text)))
            continue
        known = [item for item in prompt.messages if item["role"] != "assistant"]
        roles = [item["role"] for item in known]
        first = roles.index("user") + 1 if "user" in roles else 0
        turns = [item.get("content") for item in known[first:]]
        if not first or set(roles[first:]) - {"user"} or not all(map(_is_text, turns)):
            raise SurefootError(
                "prompts",
                f"{path}: {prompt.name} is no conversation that can be written anew",
                "give system and user messages; after the first user message, user messages of "
                "text alone (what the assistant said is left out)",
            )
        later = (*map(str, turns), *prompt.later)
        text = "\n".join((str(known[:first]), *later))
        asked.append(Asked(text, prompt_key(text), known[:first], later))
    return asked


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


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
            list[Path],
            typer.Option(metavar="DIR", help="Token shards of `surefoot train data` (repeatable)."),
        ],
        out: Annotated[Path, typer.Option(metavar="DIR", help="The drafter's folder.")],
        certify: Annotated[
            bool, typer.Option("--certify/--no-certify", help="Certify it at the end.")
        ] = True,
        check: Annotated[
            bool,
            typer.Option(
                "--check/--no-check",
                help="Compare the accepted length of the engine's rounds with the expected one.",
            ),
        ] = True,
        minutes: _Minutes = None,
    ) -> None:
        from surefoot.cli.training import train_drafter

        train_drafter(name, engine, options, data, out, check, certify, seconds_of(minutes))

    command.__doc__ = f"""Train a drafter of the kind {kind.label} on what the target wrote.

    Ends with the drafter in --out, a README.md with what was measured, and its files in
    --out/training. The same command goes on where one was ended. Under torchrun, with
    --device cuda, each process takes a GPU.
    """
    app.command(name)(command)


for _name, _kind in KINDS.items():
    _recipe_command(_name, _kind)


def seconds_of(minutes: float | None) -> float:
    return math.inf if minutes is None else 60 * minutes
