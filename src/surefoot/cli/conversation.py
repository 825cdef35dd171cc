"""The state of a chat in the terminal, and the streaming of its answers."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from surefoot.cli.terminal import DraftPainter
from surefoot.errors import SurefootError
from surefoot.request import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from surefoot.engine.llm import LLM


class Conversation:
    """Messages so far, and how the next answer is made and shown."""

    def __init__(
        self,
        llm: LLM,
        sampling: dict[str, Any],
        system: str | None = None,
        show_drafts: bool = False,
        stats: bool = False,
    ) -> None:
        self.llm = llm
        self.sampling = dict(sampling)
        self.speculation = "auto"
        self.system = system
        self.show_drafts = show_drafts
        self.stats = stats
        self.painter = DraftPainter(llm.engine.controller.names, sys.stdout)
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def undo(self) -> None:
        """Drop the last question and its answer."""
        if not self.messages or self.messages[-1]["role"] == "system":
            raise SurefootError("/undo", "there is nothing to take back")
        del self.messages[-2:]

    def toggle_drafts(self) -> None:
        self.show_drafts = not self.show_drafts
        print(f"({self.painter.legend()})" if self.show_drafts else "(drafts are not marked)")

    def toggle_stats(self) -> None:
        self.stats = not self.stats
        print(f"(numbers {'on' if self.stats else 'off'})")

    def set_sampling(self, name: str, value: Any) -> None:
        """Change a field of the sampling parameters; None takes it back to the model's default."""
        changed = {key: item for key, item in self.sampling.items() if key != name}
        if value is not None:
            changed[name] = value
        SamplingParams(**changed)
        self.sampling = changed

    def set_speculation(self, method: str) -> None:
        """Change the method; one that is not loaded is refused at once."""
        self.llm.engine.make_request("check", [0], SamplingParams(), SpeculationParams.of(method))
        self.speculation = method

    def ask(self, question: str, interruptible: bool = True) -> None:
        """Stream the answer and remember both. ``interruptible``: Ctrl-C ends the answer only,
        and what there is of it is remembered."""
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = {"prompt_token_ids": self.llm.render_chat(messages)}
        defaults, room = self.llm.sampling_defaults, self.llm.room(prompt["prompt_token_ids"])
        params = SamplingParams.with_defaults(self.sampling, defaults, room)
        answer, tokens, rounds, drafted = "", 0, 0, 0
        started = time.perf_counter()
        stream = self.llm.stream(prompt, params, speculation=self.speculation)
        guard = _interruptible() if interruptible else contextlib.nullcontext([])
        # Closing it cancels the request.
        with guard as interrupt, contextlib.closing(stream):
            for chunk in stream:
                for text, source in chunk.pieces:
                    answer += text
                    self.painter.write(text, source if self.show_drafts else None)
                sys.stdout.flush()
                rounds += 1
                tokens += len(chunk.token_ids)
                drafted += max(len(chunk.token_ids) - 1, 0)
                if interrupt:
                    break
        self.painter.close()
        print(" (stopped)" if interrupt else "")
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if self.stats and rounds:
            seconds = time.perf_counter() - started
            print(
                f"({tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second; "
                f"{rounds} rounds, {drafted} of the tokens came from accepted drafts)"
            )


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of raising, so that a round is never torn apart; pressed
    again before the list was heeded, it raises."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
