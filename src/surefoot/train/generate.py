"""``surefoot train data``: texts in the target's own words, shard by shard.

A shard depends on the settings, its number and the shards before it alone, so that a run that was
ended goes on with the first one missing.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError
from surefoot.request import SamplingParams
from surefoot.train import openings
from surefoot.train.filters import (
    MOST_REPEATED,
    Seen,
    answer_key,
    before_loop,
    prompt_key,
    reason_to_drop,
    repeated_share,
)
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
Messages = Sequence[Mapping[str, Any]]
_TURN_TOKENS = 256
"""Most of a user's turn."""
_TURN_TEMPERATURES = (0.6, 0.8)
"""No other filter: finding the likeliest tokens of a share takes a GPU longer."""
_TURN_WORDS = 24
"""Two user turns that begin with as many equal words are one."""


@dataclass(frozen=True)
class DataOptions:
    """What is generated. Sizes are counts of tokens."""

    tokens: int = 1_000_000
    """Generated tokens to reach; the last shard may go beyond."""
    shard_prompts: int = 1024
    """Prompts asked for each shard, all in one batch."""
    max_tokens: int = 512
    """Longest answer."""
    max_prompt: int = 1024
    """Longer prompts are left out."""
    min_tokens: int = 14
    """Shorter answers are left out."""
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


@dataclass(frozen=True)
class Asked:
    """``messages`` go through the chat template; without, ``text`` is completed as it is."""

    text: str
    key: int
    """Equal for prompts that count as one (``filters.prompt_key``)."""
    messages: Messages | None = None


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
    ``seconds`` are over (no shard is begun after that). ``prompts`` None: by the target, too."""
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
    writer = _Writer(llm, options, prompts)
    # Rounds that are not recorded yet would be stood in for by larger ones.
    while llm.engine.prepare():
        pass
    summary = DataSummary(0, 0, 0, 0, {}, False, 0.0)
    dropped: Counter[str] = Counter()
    started = time.monotonic()
    for path in shard_paths(folder):
        _count(summary, dropped, path)
        writer.seen.add(read_shard(path)["keys"])
    while summary.generated_tokens < options.tokens and writer.has(summary.shards):
        if time.monotonic() - started >= seconds:
            break
        progress("Generated tokens", summary.generated_tokens, options.tokens)
        documents, facts = writer.shard(summary.shards, progress)
        path = shard_path(folder, summary.shards)
        write_shard(path, documents, model.vocab_size, facts)
        _count(summary, dropped, path)
    else:
        summary.complete = True
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


class _Writer:
    def __init__(self, llm: LLM, options: DataOptions, prompts: Sequence[Asked] | None) -> None:
        self.llm, self.options = llm, options
        self.seen = Seen()
        self.prompts = self.openings = None
        if prompts is None:
            self.openings = openings.openings(llm.tokenizer)
        else:
            self.prompts = list(prompts)
            random.Random(f"prompts {options.seed}").shuffle(self.prompts)

    def has(self, index: int) -> bool:
        """Whether there are prompts for a shard of this number."""
        return self.prompts is None or index * self.options.shard_prompts < len(self.prompts)

    def shard(self, index: int, progress: Progress) -> tuple[list[Document], dict[str, Any]]:
        chooser = random.Random(f"shard {self.options.seed} {index}")
        size, dropped = self.options.shard_prompts, Counter[str]()
        if self.prompts is None:
            asked = self._written(chooser, dropped, progress, f"Shard {index}: prompts")
        else:
            asked = self.prompts[index * size : (index + 1) * size]
        requests, params, chosen = [], [], []
        for item in asked:
            drawn = self._params(chooser)
            ids = self._ids(item)
            room = self.llm.room(ids)
            if len(ids) > self.options.max_prompt or room < self.options.max_tokens:
                dropped["long prompt"] += 1
                continue
            requests.append(ids)
            params.append(drawn)
            chosen.append(item)
        documents: list[Document] = []
        outputs = self._generate(requests, params, progress, f"Shard {index}: answers")
        for item, ids, drawn, answer in zip(chosen, requests, params, outputs, strict=True):
            if repeated_share(answer) > MOST_REPEATED:
                # What led to the loop is worth learning, the loop is too easy.
                answer = before_loop(answer)
            keys = (item.key, answer_key(answer))
            reason = reason_to_drop(answer, keys, self.seen, self.options.min_tokens)
            if reason is not None:
                dropped[reason] += 1
                continue
            self.seen.add([keys])
            documents.append(Document([*ids, *answer], len(answer), drawn.temperature, keys))
        if self.prompts is None and not documents:
            # The next ones would fare no better.
            reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
            raise SurefootError("prompts", f"none of the target's own led to a text ({reasons})")
        return documents, {"dropped": dict(dropped)}

    def _written(
        self, chooser: random.Random, dropped: Counter[str], progress: Progress, label: str
    ) -> list[Asked]:
        """User turns by the target itself."""
        assert self.openings is not None
        drawn = [openings.choose(self.openings, chooser) for _ in range(self.options.shard_prompts)]
        most = max(1, min(_TURN_TOKENS, *(self.llm.room(ids) for ids in drawn)))
        params = [
            SamplingParams(
                temperature=chooser.choice(_TURN_TEMPERATURES), max_tokens=most, seed=_seed(chooser)
            )
            for _ in drawn
        ]
        ids = self._generate(drawn, params, progress, label)
        texts = self.llm.tokenizer.decode_batch(ids, skip_special_tokens=True)
        asked, keys = [], set()
        for text in map(str.strip, texts):
            key = prompt_key(text, _TURN_WORDS)
            if not text or key in keys or key in self.seen.prompts:
                dropped["duplicate" if text else "empty prompt"] += 1
                continue
            keys.add(key)
            messages = [{"role": "user", "content": text}]
            if len(self.openings) > 1 and chooser.random() < openings.SYSTEM_SHARE:
                system = chooser.choice(openings.SYSTEMS)
                messages.insert(0, {"role": "system", "content": system})
            asked.append(Asked(text, key, messages))
        return asked

    def _params(self, chooser: random.Random) -> SamplingParams:
        greedy = chooser.random() < self.options.greedy
        temperature = 0.0 if greedy else chooser.choice(self.options.temperatures)
        most = self.options.max_tokens
        return SamplingParams(temperature=temperature, max_tokens=most, seed=_seed(chooser))

    def _ids(self, item: Asked) -> list[int]:
        if item.messages is not None:
            return self.llm.render_chat(item.messages)
        return self.llm.tokenizer.encode(item.text, add_special_tokens=True)

    def _generate(
        self,
        requests: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        progress: Progress,
        label: str,
    ) -> list[list[int]]:
        if not requests:
            return []
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in requests],
            params,
            on_progress=lambda done, total: progress(label, done, total),
        )
        return [output.outputs[0].token_ids for output in outputs]


def _seed(chooser: random.Random) -> int:
    return chooser.getrandbits(62)
