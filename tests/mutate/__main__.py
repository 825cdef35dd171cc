"""Breaks lines, one at a time, in a copy of the tree, and runs the tests that have to notice."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .everything import MUTATIONS
from .mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 600.0
"""Seconds that the tests of one mutation may take: one that hangs is noticed."""
FAILED = 1
"""What pytest returns where tests ran, and some failed."""


def copy_tree(target: Path) -> None:
    """The files that git knows or would take, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's return code, ``FAILED`` where it took too long, and what it said."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(tree / "src"),
        # Bytecode is looked up by a file's size and second, which a mutation may leave as they are.
        PYTHONDONTWRITEBYTECODE="1",
        OMP_WAIT_POLICY=os.environ.get("OMP_WAIT_POLICY", "passive"),
    )
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    line += [f"tests/cpu/{test}" for test in tests]
    try:
        done = subprocess.run(
            line, cwd=tree, env=environment, timeout=LONGEST,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return FAILED, "took too long"
    return done.returncode, done.stdout


def judge(tree: Path, mutation: Mutation) -> tuple[str, str]:
    """("killed", "survived" or "broken", why) of one mutation, which is undone afterwards."""
    path = tree / mutation.path
    sound = path.read_text()
    if sound.count(mutation.old) != 1:
        return "broken", f"its text is there {sound.count(mutation.old)} times"
    path.write_text(sound.replace(mutation.old, mutation.new))
    try:
        code, said = run_tests(tree, mutation.tests)
    finally:
        path.write_text(sound)
    if code == FAILED:
        return "killed", next((x for x in said.splitlines() if x.startswith("FAILED")), "")
    return ("survived", "") if code == 0 else ("broken", said[-2000:])


def main() -> int:
    """1 where a mutation survived, or could not be judged."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations with one of these in their text")
    parser.add_argument("--list", action="store_true", help="show them, and run nothing")
    options = parser.parse_args()
    chosen = [
        each
        for each in MUTATIONS
        if not options.words or any(word in f"{each.file} {each.old}" for word in options.words)
    ]
    if not chosen:
        parser.error(f"words: no mutation's file or text has {' or '.join(options.words)}")
    if options.list:
        print(*chosen, sep="\n")
        return 0
    outcomes: dict[str, list[Mutation]] = {"killed": [], "survived": [], "broken": []}
    with tempfile.TemporaryDirectory(prefix="surefoot-mutate-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        tests = sorted({test for each in chosen for test in each.tests})
        code, said = run_tests(tree, tests)
        if code:
            print(said[-4000:], "The tests fail before anything is broken.", sep="\n")
            return 1
        for each in chosen:
            begun = time.perf_counter()
            outcome, why = judge(tree, each)
            outcomes[outcome].append(each)
            print(f"{outcome:8} {time.perf_counter() - begun:5.1f} s  {each}  {why}", flush=True)
    for outcome in ("survived", "broken"):
        for each in outcomes[outcome]:
            print(f"{outcome.upper()}: {each}")
    print(", ".join(f"{len(found)} {outcome}" for outcome, found in outcomes.items()))
    return 0 if len(outcomes["killed"]) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
