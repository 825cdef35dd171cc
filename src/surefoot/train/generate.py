"""``surefoot train data``: texts in the target's own words, shard by shard.

A shard depends on the settings, its number and the shards before it alone, so that a run that was
ended goes on with the first one missing. The engine does not wait for a shard to end: texts of the
next ones are begun as slots become free.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.engine.garbage import only_new_garbage
from surefoot.errors import SurefootError
from surefoot.request import FinishReason, Request
from surefoot.train import openings
from surefoot.train.conversations import Asked, Conversation
from surefoot.train.filters import Seen, answer_key, reason_to_drop
from surefoot.train.shards import (
    SETTINGS,
    Document,
    read_shard,
    settle,
    shard_facts,
    shard_path,
    shard_paths,
    write_shard,
)

if TYPE_CHECKING:
    from surefoot.engine.llm import LLM

Progress = Callable[[str, int, int], None]
_WAVES = 8
"""Texts are begun when this part of the slots is free: a round with prompts takes longer."""


@dataclass(frozen=True)
class DataOptions:
    """What is generated. Sizes are counts of tokens."""

    tokens: int = 1_000_000
    """Generated tokens to reach; the last shard may go beyond."""
    shard_prompts: int = 1024
    """Prompts asked for each shard."""
    max_tokens: int = 512
    """Longest answer."""
    max_prompt: int = 1024
    """Longer prompts are left out, and what follows an answer that makes one so long."""
    min_tokens: int = 14
    """Conversations with fewer generated tokens are left out."""
    greedy: float = 0.5
    """Share of the answers at temperature 0."""
    temperatures: tuple[float, ...] = (0.7, 1.0)
    """Of the others, in equal shares."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "shard_prompts", "max_tokens", "max_prompt", "min_tokens"):
            if getattr(self, name) < 1:
                raise SurefootError(name, f"{getattr(self, name)} is below 1")
        if not 0 <= self.greedy <= 1:
            raise SurefootError("greedy", f"{self.greedy} is no share from 0 to 1")
        if not self.temperatures and self.greedy < 1:
            raise SurefootError("temperatures", "is empty", "give one, or --greedy 1")
        if any(not 0 < value <= 2 for value in self.temperatures):
            raise SurefootError("temperatures", "must lie above 0 and up to 2")
        if self.min_tokens > self.max_tokens:
            raise SurefootError("min_tokens", f"is above max_tokens = {self.max_tokens}")


@dataclass
class DataSummary:
    """``complete``: the tokens asked for were reached, or all prompts were used."""

    shards: int
    documents: int
    prompt_tokens: int
    generated_tokens: int
    dropped: dict[str, int]
    complete: bool
    seconds: float


def generate_data(
    llm: LLM,
    folder: Path,
    options: DataOptions,
    prompts: Sequence[Asked] | None,
    progress: Progress,
    seconds: float = math.inf,
) -> DataSummary:
    """Write shards until ``options.tokens`` tokens were generated, the prompts are used up, or
    ``seconds`` are over (of shards that are not complete by then nothing is left). ``prompts``
    None: by the target, too. The engine is this call's alone."""
    model = llm.engine.decoder.config
    used = None if prompts is None else [item.key for item in prompts]
    settings = {
        "target": llm.config.model,
        "vocab_size": model.vocab_size,
        "dtype": str(llm.engine.decoder.backend.dtype).removeprefix("torch."),
        "prompts": None if used is None else {"count": len(used), "key": answer_key(used)},
        **asdict(options),
    }
    # Going on with more tokens is no other run.
    del settings["tokens"]
    settle(folder, SETTINGS, settings, "out")
    summary = DataSummary(0, 0, 0, 0, {}, False, 0.0)
    dropped: Counter[str] = Counter()
    started, seen = time.monotonic(), Seen()
    for path in shard_paths(folder):
        _count(summary, dropped, path)
        seen.add(read_shard(path)["keys"])
    writer = _Writer(llm, options, prompts, summary.shards)
    try:
        with only_new_garbage():
            while summary.generated_tokens < options.tokens:
                late = time.monotonic() - started >= seconds
                if late or not writer.step():
                    summary.complete = not late
                    break
                for conversations in writer.finished():
                    documents, facts = _documents(conversations, seen, options)
                    path = shard_path(folder, summary.shards)
                    write_shard(path, documents, model.vocab_size, facts)
                    _count(summary, dropped, path)
                    progress("Generated tokens", summary.generated_tokens, options.tokens)
                    if summary.generated_tokens >= options.tokens:
                        break
            else:
                summary.complete = True
    finally:
        writer.cancel()
    summary.dropped = dict(dropped)
    summary.seconds = time.monotonic() - started
    return summary


def _count(summary: DataSummary, dropped: Counter[str], path: Path) -> None:
    tensors = read_shard(path)
    generated = int(tensors["mask"].sum())
    summary.shards += 1
    summary.documents += len(tensors["lengths"])
    summary.generated_tokens += generated
    summary.prompt_tokens += len(tensors["ids"]) - generated
    dropped.update(shard_facts(path)["dropped"])


def _documents(
    conversations: Sequence[Conversation], seen: Seen, options: DataOptions
) -> tuple[list[Document], dict[str, Any]]:
    """What a shard keeps of them, and its facts."""
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    for conversation in conversations:
        reason = conversation.dropped
        if reason is None:
            document = conversation.document()
            written = sum(end - first for first, end in document.answers)
            reason = reason_to_drop(written, document.keys, seen, options.min_tokens)
            if reason is None:
                seen.add([document.keys])
                documents.append(document)
        if reason is not None:
            dropped[reason] += 1
    if not documents and conversations[0].by_target:
        # The next ones would fare no better.
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
        raise SurefootError("prompts", f"none of the target's own led to a text ({reasons})")
    return documents, {"dropped": dict(dropped)}


class _Writer:
    """Keeps the engine busy with the conversations of one shard after the other."""

    def __init__(
        self, llm: LLM, options: DataOptions, prompts: Sequence[Asked] | None, shard: int
    ) -> None:
        """``shard``: the number of the first one."""
        self.llm, self.options = llm, options
        self.prompts = None if prompts is None else list(prompts)
        if self.prompts is not None:
            random.Random(f"prompts {options.seed}").shuffle(self.prompts)
        self.openings = openings.openings(llm.tokenizer) if prompts is None else []
        self.next_shard = shard
        self._begun: deque[list[Conversation]] = deque()
        """Shards that were not given away yet, in order."""
        self._left: deque[int] = deque()
        """How many conversations of each go on."""
        self._waiting: deque[tuple[int, Conversation]] = deque()
        """With the number of their shard."""
        self._running: dict[Request, tuple[int, Conversation]] = {}
        self._requests = 0

    def step(self) -> bool:
        """A round of the engine. False: all prompts are used, and all texts have ended."""
        slots = self.llm.config.max_num_seqs
        while len(self._waiting) < slots and self._has(self.next_shard):
            self._begin_shard()
        if slots - len(self._running) >= min(max(1, slots // _WAVES), len(self._waiting)):
            while self._waiting and len(self._running) < slots:
                self._begin(*self._waiting.popleft())
        if not self._running:
            return bool(self._begun)
        for item in self.llm.engine.step():
            if item.request.finished:
                shard, conversation = self._running.pop(item.request)
                conversation.take(item.request.output)
                self._waiting.appendleft((shard, conversation))
        return True

    def finished(self) -> list[list[Conversation]]:
        """The next shards, as far as all of their conversations are over. Each is given once."""
        found = []
        while self._left and not self._left[0]:
            self._left.popleft()
            found.append(self._begun.popleft())
        return found

    def cancel(self) -> None:
        """End what still runs."""
        for request in self._running:
            self.llm.engine.finish(request, FinishReason.ABORT)

    def _has(self, shard: int) -> bool:
        """Whether there are prompts for a shard of this number."""
        return self.prompts is None or shard * self.options.shard_prompts < len(self.prompts)

    def _begin_shard(self) -> None:
        size, shard = self.options.shard_prompts, self.next_shard
        asked: Sequence[Asked | None] = [None] * size
        if self.prompts is not None:
            asked = self.prompts[shard * size : (shard + 1) * size]
        made = [
            Conversation(
                self.llm,
                self.options,
                random.Random(f"text {self.options.seed} {shard} {place}"),
                item,
                self.openings,
            )
            for place, item in enumerate(asked)
        ]
        self.next_shard += 1
        self._begun.append(made)
        self._left.append(len(made))
        self._waiting += [(shard, conversation) for conversation in made]

    def _begin(self, shard: int, conversation: Conversation) -> None:
        """Have the next text of a conversation written, unless it is over."""
        wanted = conversation.request()
        if wanted is None:
            self._left[shard - self.next_shard] -= 1
            return
        engine = self.llm.engine
        request = engine.make_request(f"text-{self._requests}", *wanted)
        self._requests += 1
        self._running[request] = shard, conversation
        engine.add(request)
