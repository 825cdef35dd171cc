"""``surefoot doctor``: what Surefoot needs, whether this machine has it, and what to do if not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from surefoot.cli.checks import (
    FAIL,
    OK,
    WARN,
    Finding,
    check_cache,
    check_compiler,
    check_drafter,
    check_gpu,
    check_kernels,
    check_model,
    check_packages,
    check_python,
    check_torch,
    one_line,
)
from surefoot.cli.terminal import has_colour
from surefoot.cli.verb import verb
from surefoot.cli.version import version_line
from surefoot.config import DEFAULT_MODEL
from surefoot.errors import SurefootError

_COLOURS = {OK: "32", WARN: "33", FAIL: "31"}


def findings(model: str) -> Iterator[Finding]:
    """One after the other, as some take seconds."""
    checks: dict[str, Callable[[], Finding | None]] = {
        "Python": check_python,
        "packages": lambda: check_packages("packages", "", FAIL, "Surefoot"),
        "torch": check_torch,
        "compiler": check_compiler,
        "kernels": check_kernels,
        "GPU": check_gpu,
        "cache": check_cache,
        "model": lambda: check_model(model),
        "drafter": lambda: check_drafter(model),
        "server": lambda: check_packages("server", "server", WARN, "`surefoot serve`"),
    }
    for name, check in checks.items():
        try:
            finding = check()
            if finding is not None:
                yield finding
        except SurefootError as error:
            yield Finding(name, FAIL, f"{error.option}: {error.problem}", error.fix)
        except Exception as error:  # whatever is broken here is what the user came for
            detail = one_line(f"{type(error).__name__}: {error}")
            yield Finding(name, FAIL, detail, "if this does not say what to do, report it")


@verb()
def doctor(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="The model to look for; as for other verbs."),
    ] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what Surefoot needs on this machine, and say what to do where something is missing.

    Compiles the CPU kernels if they are not there yet; downloads nothing. The exit code is 0 when
    Surefoot can run here, else 1.
    """
    found = []
    if not as_json:
        print(version_line())
    for finding in findings(model):
        found.append(finding)
        if not as_json:
            _show(finding)
    runs = all(finding.status != FAIL for finding in found)
    if as_json:
        facts = {"surefoot": version_line().partition(" ")[2], "runs": runs}
        print(json.dumps({**facts, "checks": [asdict(finding) for finding in found]}))
    else:
        print("Surefoot can run here." if runs else "Surefoot cannot run here as it is.")
    raise typer.Exit(0 if runs else 1)


def _show(finding: Finding) -> None:
    status = f"{finding.status:4}"
    if has_colour(sys.stdout):
        status = f"\x1b[{_COLOURS[finding.status]}m{status}\x1b[0m"
    print(f"{status}  {finding.name:8}  {finding.detail}", flush=True)
    if finding.fix:
        print(f"{'':16}-> {finding.fix}", flush=True)
