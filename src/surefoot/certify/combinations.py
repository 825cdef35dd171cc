"""Which sampling options are tested together: each alone, those that need to know a text, grammars,
and designs in which any two values meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from surefoot.certify.compare import Judge
from surefoot.certify.jobs import PLAIN, Job
from surefoot.certify.pairs import pairwise
from surefoot.certify.parity import seed_of
from surefoot.certify.sizes import Size
from surefoot.request import SamplingParams
from surefoot.structured import StructuredOutputsParams

SAMPLED = {"temperature": 1.0}
GREEDY = {"temperature": 0.0}
BESIDE_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.5, "top_k": 20, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5},
)
"""What grammars, and tokens ruled out, are combined with."""
SINGLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.05},
    {"temperature": 2.0},
    {**SAMPLED, "top_k": 1},
    {**SAMPLED, "top_k": 20},
    {"temperature": 20.0, "top_k": 2},
    {"temperature": 20.0, "top_k": 3},
    {**SAMPLED, "top_p": 0.2},
    {**SAMPLED, "top_p": 0.9},
    {**SAMPLED, "min_p": 0.1},
    {**GREEDY, "repetition_penalty": 1.3},
    {**GREEDY, "repetition_penalty": 0.8},
    {**SAMPLED, "repetition_penalty": 1.3},
    {**GREEDY, "presence_penalty": 1.5},
    {**SAMPLED, "presence_penalty": 1.0},
    {**GREEDY, "presence_penalty": -1.5},
    {**GREEDY, "frequency_penalty": 1.0},
    {**SAMPLED, "frequency_penalty": 1.0},
    {**GREEDY, "frequency_penalty": -0.5},
    {**GREEDY, "logprobs": 5},
    {**SAMPLED, "logprobs": 0},
    {**GREEDY, "prompt_logprobs": 2},
    {**SAMPLED, "n": 3},
    # Filters of what penalties leave.
    {**SAMPLED, "top_p": 0.5, "repetition_penalty": 1.8},
    {"temperature": 1.5, "top_p": 0.6, "presence_penalty": 1.5, "frequency_penalty": 1.0},
)
SOME = True
"""Stands for a value that depends on the model, its vocabulary or the text."""
GREEDY_FACTORS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, 0.9, 1.3),
    "presence_penalty": (0.0, -0.7, 1.2),
    "frequency_penalty": (0.0, -0.3, 0.8),
    "logprobs": (None, 0, 3),
    "prompt_logprobs": (None, 1),
    "logit_bias": (None, SOME),
    "stop_token_ids": (None, SOME),
    "min_tokens": (0, SOME),
    "ignore_eos": (True, False),
}
SAMPLED_FACTORS: dict[str, tuple[Any, ...]] = GREEDY_FACTORS | {
    "temperature": (0.3, 0.8, 1.5),
    "top_k": (0, 5, 50),
    "top_p": (1.0, 0.5, 0.9),
    "min_p": (0.0, 0.02, 0.2),
    "n": (1, 2),
}
"""Which values are combined; every seed is another one, half of them beyond 32 bits."""


def parameter_jobs(
    judge: Judge, size: Size, structures: Sequence[StructuredOutputsParams] = ()
) -> list[Job]:
    """The single parameters, those that need to know a text, grammars, pairwise designs."""
    jobs: list[Job] = []
    for values in SINGLES:
        _add(jobs, judge, size, values)
    for values in _from_text(judge, size):
        _add(jobs, judge, size, values, judge.subject.prompts[0])
    for number, structure in enumerate(structures):
        for base in (GREEDY, SAMPLED, BESIDE_GRAMMARS[number % len(BESIDE_GRAMMARS)]):
            _add(jobs, judge, size, {**base, "structured_outputs": structure, "ignore_eos": False})
    random = Random(7)
    for design in range(size.designs):
        for base, factors in ((GREEDY, GREEDY_FACTORS), ({}, SAMPLED_FACTORS)):
            for row in pairwise(factors, design):
                _add(jobs, judge, size, {**base, **_concrete(row, judge, size, random)})
    return jobs


def _concrete(row: Mapping[str, Any], judge: Judge, size: Size, random: Random) -> dict[str, Any]:
    """A design's row without what is the default anyway, and with values for ``SOME``."""
    vocab = judge.subject.decoder.config.vocab_size
    usual = SamplingParams(ignore_eos=True)
    values = {name: value for name, value in row.items() if value != getattr(usual, name)}
    if "logit_bias" in values:
        ids = random.sample(range(vocab), min(vocab, 8))
        values["logit_bias"] = {token: random.choice((-5.0, 2.0)) for token in ids}
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(random.randrange(vocab) for _ in range(2))
    if "min_tokens" in values:
        values["min_tokens"] = random.randint(1, size.parameter_length // 2)
    return values


def _add(
    jobs: list[Job],
    judge: Judge,
    size: Size,
    values: Mapping[str, Any],
    prompt: tuple[int, ...] | None = None,
) -> None:
    number = len(jobs)
    prompts = judge.subject.prompts
    prompt = prompt or prompts[number % len(prompts)]
    room = judge.subject.decoder.config.max_positions - len(prompt)
    defaults = {"ignore_eos": True, "seed": seed_of(4000 + number)}
    length = min(size.parameter_length, room)
    params = SamplingParams(**{**defaults, "max_tokens": length, **values})
    label = ", ".join(f"{name}={value!r}" for name, value in values.items())
    for choice in range(params.n):
        leader = number if choice else None
        jobs.append(Job(prompt, params, PLAIN, choice=choice, leader=leader, label=label))


def _from_text(judge: Judge, size: Size) -> list[dict[str, Any]]:
    """Parameters that only mean something beside a certain text: what ends it, what is biased."""
    prompts = judge.subject.prompts
    room = judge.subject.decoder.config.max_positions - max(map(len, prompts))
    length = min(size.parameter_length, room)
    greedy = SamplingParams(temperature=0, seed=1, max_tokens=length, ignore_eos=True)
    probe = Job(prompts[0], greedy)
    [text] = judge.plain_texts([probe])
    early, middle = text.tokens[length // 4], text.tokens[length // 2]
    likely = tuple(dict.fromkeys(text.tokens))
    found: list[dict[str, Any]] = []
    for base in (GREEDY, SAMPLED):
        found += [
            {**base, "stop_token_ids": (middle,)},
            {**base, "stop_token_ids": (early,), "min_tokens": length // 2},
            # Ends that nearly every row would take, if it might; and below, tokens.
            {**base, "stop_token_ids": likely, "min_tokens": length * 3 // 4},
            {**base, "ignore_eos": False},
            {**base, "ignore_eos": False, "min_tokens": length // 2},
            {**base, "logit_bias": {early: -20.0, middle: 3.0}},
            {**base, "logit_bias": dict.fromkeys(likely, -8.0)},
        ]
    vocab = judge.subject.decoder.config.vocab_size
    # Half of what is likely, so that much of what plain text would have is ruled out.
    allowed = tuple(sorted({*likely[::2], *Random(5).sample(range(vocab), min(vocab, 16))}))
    for base in (GREEDY, SAMPLED, *BESIDE_GRAMMARS):
        found.append({**base, "allowed_token_ids": allowed})
    tokenizer = judge.subject.tokenizer
    if tokenizer is not None:
        spans = [text.tokens[at : at + size] for at in (0, 3, length // 2) for size in (1, 2, 3)]
        bad = tuple(filter(None, map(tokenizer.decode, spans)))
        for base in (GREEDY, SAMPLED, *BESIDE_GRAMMARS) if bad else ():
            found.append({**base, "bad_words": bad})
        words = tokenizer.decode(text.tokens)
        piece = words[len(words) // 2 :][:3]
        for base in (GREEDY, SAMPLED):
            found += [
                {**base, "stop": (piece,)},
                {**base, "stop": (piece, "\n\n"), "include_stop_str_in_output": True},
            ]
    return found
