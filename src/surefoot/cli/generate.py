"""``surefoot generate``: complete one prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.options import (
    engine_options,
    refuse_idle_speculation,
    sampling_options,
    speculation_option,
    with_temperature,
)
from surefoot.cli.structure_options import structure_options
from surefoot.cli.terminal import DraftPainter, load, printable, progress_bars
from surefoot.cli.verb import verb
from surefoot.errors import SurefootError
from surefoot.request import SamplingParams
from surefoot.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from surefoot.engine.llm import LLM

DEFAULT_MAX_TOKENS = 256


@verb(
    engine=engine_options,
    sampling=sampling_options,
    structure=structure_options,
    speculation=speculation_option,
)
def generate(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    structure: StructuredOutputsParams | None,
    speculation: str,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to complete; - or nothing reads stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file.", show_default=False)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Answer through the chat template, or complete as is."),
    ] = False,
    n: Annotated[int, typer.Option(help="How many texts to generate.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: the k likeliest tokens of each position.")
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the text by who proposed it.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Complete a prompt; the text streams to the terminal.

    Without --max-tokens it ends after 256 tokens, or where the context does. What the model's
    generation_config.json recommends for sampling is not used.
    """
    if show_drafts and as_json:
        raise SurefootError("show_drafts", "does not go with --json", "drop one of them")
    if show_drafts and speculation == "off":
        raise SurefootError("show_drafts", "shows nothing with --speculation off")
    if logprobs is not None and not as_json:
        raise SurefootError("logprobs", "are only shown in JSON", "give --json too")
    if show_drafts and n > 1:
        raise SurefootError("show_drafts", "shows one text only", "drop --n")
    refuse_idle_speculation(speculation, engine)
    given = with_temperature(sampling)
    given |= {"n": n, "logprobs": logprobs, "structured_outputs": structure}
    SamplingParams(**given)
    text = read_prompt(prompt, prompt_file)
    llm = load(engine, generation_config="none")
    tokens = _tokenize(llm, text, chat)
    defaults = {"max_tokens": DEFAULT_MAX_TOKENS}
    params = SamplingParams.with_defaults(given, defaults, llm.room(tokens))
    request = {"prompt": text, "prompt_token_ids": tokens}
    if as_json:
        print(json.dumps(_result(llm, request, params, speculation)))
    elif n == 1:
        _stream(llm, request, params, speculation, show_drafts)
    else:
        _print_choices(llm, request, params, speculation)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from wherever it was given. A last line break of a file or stdin is dropped."""
    if prompt_file is not None:
        if prompt is not None:
            raise SurefootError("prompt_file", "was given beside a prompt", "drop one of them")
        try:
            return prompt_file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SurefootError("prompt_file", f"cannot be read: {error}") from None
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise SurefootError("prompt", "is missing", "give it, or --prompt-file, or pipe it in")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SurefootError("prompt", f"on stdin is no text: {error}") from None


def _tokenize(llm: LLM, text: str, chat: bool) -> list[int]:
    if chat:
        return llm.render_chat([{"role": "user", "content": text}])
    return llm.tokenizer.encode(text, add_special_tokens=True)


def _result(
    llm: LLM, request: dict[str, Any], params: SamplingParams, speculation: str
) -> dict[str, Any]:
    started = time.perf_counter()
    [output] = llm.generate([request], params, speculation=speculation)
    seconds = time.perf_counter() - started
    result = {"model": llm.config.model, **dataclasses.asdict(output), "seconds": seconds}
    for choice, entry in zip(output.outputs, result["outputs"], strict=True):
        entry["speculation"]["accepted_length"] = choice.speculation.accepted_length
    return result


def _stream(
    llm: LLM, request: dict[str, Any], params: SamplingParams, speculation: str, show_drafts: bool
) -> None:
    engine = llm.engine
    names = engine.controller.names if params.structured_outputs is None else engine.proposer_names
    painter = DraftPainter(names, sys.stdout)
    for chunk in llm.stream(request, params, speculation=speculation):
        for text, source in chunk.pieces:
            painter.write(text, source if show_drafts else None)
        sys.stdout.flush()
    painter.close()
    print()
    if show_drafts:
        print(f"\n({painter.legend()})")


def _print_choices(
    llm: LLM, request: dict[str, Any], params: SamplingParams, speculation: str
) -> None:
    """Several texts cannot stream into one terminal: they are printed when all are done."""
    with progress_bars() as progress:
        progress(f"Generating {params.n} texts", 0, 0)
        [output] = llm.generate([request], params, speculation=speculation)
    for choice in output.outputs:
        print(f"--- {choice.index + 1} of {params.n}")
        print(printable(choice.text, sys.stdout))
