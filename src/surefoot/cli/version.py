"""Which Surefoot this is: its version, and the commit where that is known.

The build hook runs this file by its path, before the package is there: it imports no other module
of Surefoot.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
RECORD = "commit.txt"
"""The file of the package that holds the commit; ``hatch_build.py`` puts it into wheels."""


def version_line() -> str:
    """``surefoot 0.1.0 (commit 0123456789ab)``; without the commit where that is not known."""
    from surefoot import __version__

    commit = known_commit()
    return f"surefoot {__version__} (commit {commit})" if commit else f"surefoot {__version__}"


def known_commit(package: Path = PACKAGE) -> str | None:
    """The commit that ``package`` was built from, or that is checked out where it lies in a git
    repository as ``src/surefoot``; ``-dirty`` behind it means changed files."""
    record = package / RECORD
    if record.is_file():
        return record.read_text(encoding="ascii").strip()
    return checked_out(package.parents[1]) if package.parent.name == "src" else None


def checked_out(root: Path) -> str | None:
    """The commit of the git repository whose top folder is ``root``; None if it is none, or git
    does not tell."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(
            [*command, "--abbrev=12"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
