"""Runs prompts plain and speculatively, in turn, on one engine.

A batch of prompts is submitted at once and run to its end, first one way, then the other: a pair
of runs. A pass is one pair of every batch; passes are repeated, so that each prompt's pairs are
spread over the whole measurement. Which way goes first alternates from batch to batch and from pass
to pass: a machine that slows down or speeds up harms both alike. What is timed is what
``LLM.generate`` does after tokenising: rounds, detokenising, bookkeeping. ``seconds`` runs from the
submission to the last token; ``decode_seconds`` from the moment when every request of the batch has
its first token, and ``decode_tokens`` are those that came after it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surefoot.bench.prompts import BenchPrompt
from surefoot.engine.garbage import only_new_garbage
from surefoot.engine.llm import LLM
from surefoot.engine.output import CompletionOutput, TextStream
from surefoot.errors import SurefootError
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams

PLAIN = "off"
WARMUP_TOKENS = 16
PASSES_SECONDS = 24.0
FEWEST_PASSES, MOST_PASSES = 3, 30
_ids = itertools.count()


@dataclass(frozen=True)
class Settings:
    """``method`` is what plain decoding is compared with; ``off``, plain decoding itself, shows
    the machine's noise. ``repeats`` is the number of passes; None: as many as fit into
    ``PASSES_SECONDS``, from ``FEWEST_PASSES`` to ``MOST_PASSES``. ``warmup`` runs of each way,
    shortened to a few tokens, come first and are not counted."""

    params: SamplingParams
    method: str = "auto"
    repeats: int | None = None
    batch_size: int = 1
    warmup: int = 1

    def __post_init__(self) -> None:
        for name, low in (("repeats", 1), ("batch_size", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise SurefootError(name, f"{value} is below {low}")

    def passes(self, done: int, seconds: float) -> int:
        """How many passes there will be, after ``done`` that took ``seconds`` together. It depends
        on time alone: going on until the ratios look good would make them look better than they
        are."""
        if self.repeats is not None:
            return self.repeats
        fitting = int(PASSES_SECONDS * done / seconds) if seconds else FEWEST_PASSES
        return max(done, min(MOST_PASSES, max(FEWEST_PASSES, fitting)))


@dataclass(frozen=True)
class Run:
    """One batch, run once one way. ``pieces``: per prompt, the text by who proposed it."""

    seconds: float
    decode_seconds: float
    decode_tokens: int
    outputs: tuple[CompletionOutput, ...]
    pieces: tuple[tuple[tuple[str, str | None], ...], ...]

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True)
class Pair:
    """Runs of the same batch, ``speculative`` right after ``plain`` or before it."""

    plain: Run
    speculative: Run


@dataclass(frozen=True)
class Measured:
    """A batch and its pairs, one a pass."""

    category: str
    prompts: tuple[BenchPrompt, ...]
    pairs: tuple[Pair, ...]


def measure(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    settings: Settings,
    on_pair: Callable[[Measured], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Measured]:
    """Measure all prompts, batch by batch; a batch never mixes categories.

    Every prompt is checked against the engine before anything runs. ``on_pair`` gets each batch
    with its first pair, as soon as that is there; ``on_progress`` (runs done, runs expected).
    """
    if settings.batch_size > llm.config.max_num_seqs:
        raise SurefootError(
            "batch_size",
            f"{settings.batch_size} is above the engine's {llm.config.max_num_seqs}",
            "raise max_num_seqs",
        )
    batches = _batches(prompts, settings.batch_size)
    tokens = [[_tokenize(llm, prompt) for prompt in batch] for batch in batches]
    for batch, lists in zip(batches, tokens, strict=True):
        for prompt, ids in zip(batch, lists, strict=True):
            _check(llm, prompt, ids, settings)
    short = min(WARMUP_TOKENS, settings.params.max_tokens or WARMUP_TOKENS)
    brief = replace(settings.params, max_tokens=short, min_tokens=0)
    for _ in range(settings.warmup):
        for method in (PLAIN, settings.method):
            run_batch(llm, tokens[0], brief, method)
    pairs: list[list[Pair]] = [[] for _ in batches]
    begun, done, passes = time.perf_counter(), 0, settings.passes(0, 0.0)
    while done < passes:
        for index, (batch, ids) in enumerate(zip(batches, tokens, strict=True)):
            pairs[index].append(_run_pair(llm, ids, settings, (done + index) % 2 == 0))
            if on_pair is not None and done == 0:
                on_pair(_measured(batch, pairs[index]))
            if on_progress is not None:
                on_progress(2 * (done * len(batches) + index + 1), 2 * passes * len(batches))
        done += 1
        passes = settings.passes(done, time.perf_counter() - begun)
    return [_measured(batch, found) for batch, found in zip(batches, pairs, strict=True)]


def _measured(batch: Sequence[BenchPrompt], pairs: Sequence[Pair]) -> Measured:
    return Measured(batch[0].category, tuple(batch), tuple(pairs))


def _run_pair(
    llm: LLM, prompts: Sequence[Sequence[int]], settings: Settings, plain_first: bool
) -> Pair:
    if plain_first:
        plain = run_batch(llm, prompts, settings.params, PLAIN)
        return Pair(plain, run_batch(llm, prompts, settings.params, settings.method))
    speculative = run_batch(llm, prompts, settings.params, settings.method)
    return Pair(run_batch(llm, prompts, settings.params, PLAIN), speculative)


@only_new_garbage()
def run_batch(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, method: str
) -> Run:
    """Submit ``prompts`` at once, one way, and time them until the last has ended."""
    engine = llm.engine
    requests = [_request(llm, tokens, params, method) for tokens in prompts]
    streams = {request.request_id: TextStream(request, llm.tokenizer) for request in requests}
    waiting = {request.request_id for request in requests}
    decode_tokens = 0
    started = all_started = time.perf_counter()
    for request in requests:
        engine.add(request)
    try:
        while any(not request.finished for request in requests):
            progress = engine.step()
            for item in progress:
                streams[item.request.request_id].push(item.tokens, last=item.request.finished)
            if waiting:
                waiting -= {item.request.request_id for item in progress}
                all_started = time.perf_counter()
            else:
                decode_tokens += sum(len(item.tokens) for item in progress)
    except BaseException:
        for request in requests:
            if not request.finished:
                engine.finish(request, FinishReason.ABORT)
        raise
    ended = time.perf_counter()
    return Run(
        seconds=ended - started,
        decode_seconds=ended - all_started,
        decode_tokens=decode_tokens,
        outputs=tuple(stream.output() for stream in streams.values()),
        pieces=tuple(tuple(stream.take(final=True)) for stream in streams.values()),
    )


def _batches(prompts: Sequence[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    batches = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        group = [prompt for prompt in prompts if prompt.category == category]
        batches += [group[start : start + size] for start in range(0, len(group), size)]
    return batches


def _tokenize(llm: LLM, prompt: BenchPrompt) -> list[int]:
    if prompt.text is not None:
        return llm.tokenizer.encode(prompt.text, add_special_tokens=True)
    return llm.render_chat(prompt.messages)


def _request(llm: LLM, tokens: Sequence[int], params: SamplingParams, method: str) -> Request:
    name = f"bench-{next(_ids)}"
    return llm.engine.make_request(name, tokens, params, SpeculationParams(method))


def _check(llm: LLM, prompt: BenchPrompt, tokens: Sequence[int], settings: Settings) -> None:
    try:
        _request(llm, tokens, settings.params, settings.method)
    except SurefootError as error:
        if error.option in ("prompt", "max_tokens"):
            raise SurefootError("prompts", f"{prompt.name}: {error}") from None
        raise
