"""Compiles grammars in a process of its own, which ends when one takes too much: whoever compiles a
grammar that was tried knows what it costs, as compiling cannot be interrupted."""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import signal
import subprocess
import sys
from typing import Any

from surefoot.errors import SurefootError
from surefoot.sampling.grammar import Grammars
from surefoot.structured import StructuredOutputsParams

SECONDS = 3.0
"""Of a processor, for one grammar."""
MEMORY = 4 << 30
"""Bytes of the process."""
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from surefoot.sampling.trial import main
main()"""


class Trial:
    """The process, for one thread; it is started when it is needed, and again after it ended."""

    def __init__(self, grammars: Grammars) -> None:
        """For the model of ``grammars``."""
        self._grammars = grammars
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, wanted: StructuredOutputsParams, seconds: float = SECONDS) -> None:
        """Raises SurefootError for a grammar that cannot be compiled, or not within ``seconds``."""
        try:
            error = self._ask(wanted, seconds)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.close()
            raise SurefootError(
                wanted.option,
                f"takes over {seconds:g} s of a processor to compile, or too much memory",
                "make it smaller",
            ) from None
        if error is not None:
            raise SurefootError(*error)

    def _ask(self, wanted: StructuredOutputsParams, seconds: float) -> Any:
        process = self._process or self._begin()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump((wanted, seconds), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    def _begin(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        own = self._grammars
        pieces = [own.tokenizer.token_bytes(token) for token in range(own.tokenizer.vocab_size)]
        start = pieces, own.tokenizer.special_ids, own.vocab_size, own.end_tokens
        assert process.stdin is not None
        pickle.dump(start, process.stdin)
        return process

    def close(self) -> None:
        """End the process; another ``check`` starts it again."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            process.wait()


class _Pieces:
    """As much of a tokenizer as compiling needs."""

    def __init__(self, pieces: list[bytes], special_ids: frozenset[int]) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.special_ids = special_ids

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """For the library's own use, of which nothing here depends."""
        return [0]


def main() -> None:
    """Answer until the other end is closed. The system ends a process whose time is up."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    pieces, special_ids, vocab_size, end_tokens = pickle.load(source)
    tokenizer: Any = _Pieces(pieces, special_ids)
    grammars = Grammars(tokenizer, vocab_size, end_tokens)
    # Reading the vocabulary is not the grammar's fault.
    grammars.start(StructuredOutputsParams(regex="a"))
    while True:
        try:
            wanted, seconds = pickle.load(source)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        error = None
        try:
            grammars.start(wanted)
        except SurefootError as caught:
            error = caught.option, caught.problem, caught.fix
        signal.setitimer(signal.ITIMER_PROF, 0)
        pickle.dump(error, sink)
        sink.flush()
