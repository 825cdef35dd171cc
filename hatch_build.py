"""Records the commit that a wheel or an sdist is built from, for ``surefoot --version``.

It is $SUREFOOT_COMMIT, or that of the git checkout; a build that knows neither records none.
"""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "src/surefoot"


class CommitHook(BuildHookInterface):
    """Adds the file that ``surefoot.cli.version`` reads."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="surefoot-"))
        module = runpy.run_path(os.path.join(self.root, PACKAGE, "cli", "version.py"))
        commit = os.environ.get("SUREFOOT_COMMIT") or module["checked_out"](Path(self.root))
        # An editable installation asks git each time.
        if commit is None or version == "editable":
            return
        name = module["RECORD"]
        record = self.folder / name
        record.write_text(commit + "\n", encoding="ascii")
        package = PACKAGE if self.target_name == "sdist" else "surefoot"
        build_data["force_include"][str(record)] = f"{package}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder)
