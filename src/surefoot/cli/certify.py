"""``surefoot certify``: proof that speculation changes nothing, or where it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.certify_options import engine_group
from surefoot.cli.certifying import check_writable, compare, issue
from surefoot.cli.verb import verb
from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.speculation.registry import DRAFTERS

NO_CERTIFICATE = 2


@verb(engine=engine_group)
def certify(
    engine: dict[str, Any],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines as for `surefoot bench`, beside the built-in prompts' patterns.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller certificate with weaker thresholds.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test/--no-self-test",
            help="First break the engine in known ways and check that each is found.",
        ),
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all results.", show_default=False),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page.", show_default=False),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Twice: compare two OpenAI-compatible servers instead, of any engine.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check that speculation is lossless for a model, proposers, dtype and backend.

    Compares greedy and sampled text, endings and logprobs with plain decoding
    position by position: batches of all sizes, draft lengths, drafts that are
    nearly right, long texts, arrivals, memory shortage, sampling parameters in
    pairs. Tests the distribution of sampled text, and that the drafters' state
    is never stale. Says what it covers and what not. What the model's
    generation_config.json recommends for sampling is not used.

    Exit code 0: PASS. 1: FAIL. 2: INCONCLUSIVE, or no certificate was made.
    """
    try:
        for option, path in (("json", json_file), ("html", html_file)):
            check_writable(option, path)
        if url:
            _refuse_engine_options(engine, quick, self_test)
            result = compare(url, prompts, json_file, html_file)
        else:
            result = issue(engine, prompts, quick, self_test, json_file, html_file)
    except SurefootError as error:
        # Exit code 1 would say that exactness was disproved.
        raise _no_certificate(error) from None
    raise typer.Exit(result)


def _no_certificate(error: SurefootError) -> typer.Exit:
    from surefoot.cli.verb import report

    spellings = {name: f"--{name.replace('_', '-')}" for name in EngineConfig.__dataclass_fields__}
    spellings |= {"url": "--url", "prompts": "--prompts", "model": "model"}
    spellings |= {"proposer": "--proposer", "proposer_option": "--proposer-option"}
    spellings |= {"quick": "--quick", "self_test": "--no-self-test"}
    spellings |= {"json": "--json", "html": "--html"}
    spellings |= {name: f"--{name}" for name in DRAFTERS}
    report(error, spellings)
    return typer.Exit(NO_CERTIFICATE)


def _refuse_engine_options(engine: dict[str, Any], quick: bool, self_test: bool) -> None:
    for name in engine:
        raise SurefootError(name, "does nothing with --url", "drop one of them")
    if quick:
        raise SurefootError("quick", "does nothing with --url", "drop one of them")
    if not self_test:
        raise SurefootError("self_test", "does nothing with --url", "drop one of them")
