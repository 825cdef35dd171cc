"""What structured output costs: ``python -m surefoot.bench.structured``.

Microseconds of compiling a grammar, of a mask, of following a token and of looking at drafts, with
a model's tokenizer; of masking a row of logits; and, with ``--runs N``, N texts sampled at
temperature 1 with every draft verified and without speculation: how many are whole, and whether
they are the same. With ``--forced N``, N texts one after the other, each with all proposers, with
one of them alone, and plainly, in turn: what share of the tokens were drafts of forced text, tokens
a round, and the pace against plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from surefoot.kernels.draws import TokenMasks, mask_tokens
from surefoot.models.loading import load_tokenizer
from surefoot.sampling.grammar import Grammars
from surefoot.structured import StructuredOutputsParams

PERSON = {
    "name": "Ada Byron",
    "age": 36,
    "email": "ada@analytical.com",
    "tags": ["red", "blue"],
    "address": {"street": "12 St James Square", "zip": "12345"},
}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMA = _object(
    name={"type": "string", "minLength": 1, "maxLength": 24},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    email={"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.com$"},
    tags={
        "type": "array",
        "items": {"enum": ["red", "green", "blue"]},
        "minItems": 1,
        "maxItems": 3,
    },
    address=_object(
        street={"type": "string", "maxLength": 24},
        zip={"type": "string", "pattern": "^[0-9]{5}$"},
    ),
)
COMPACT = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
GRAMMARS = {
    "schema": COMPACT,
    "any object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"[a-z]{1,20}(-[a-z0-9]{1,20}){0,5}@[a-z]+\.(com|org)"),
}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``work`` and its microseconds."""
    begun = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - begun) * 1e6


def show(what: str, times: list[float]) -> None:
    middle = statistics.median(times)
    print(f"{what:34} median {middle:8.1f} us, most {max(times):8.1f} us, of {len(times)}")


def measure_grammars(model: str) -> None:
    """Times of the grammar library by a text that fits ``SCHEMA``."""
    _, tokenizer = load_tokenizer(model)
    size, end = tokenizer.vocab_size, tokenizer.eos_id or 0
    grammars = Grammars(tokenizer, size, (end,))
    _, first = timed(lambda: grammars.start(StructuredOutputsParams(regex="a")))
    print(f"{size} tokens; vocabulary and a first grammar: {first / 1e6:.2f} s")
    for name, wanted in GRAMMARS.items():
        times = []
        for _ in range(7):
            grammars._compiled.clear()
            times.append(timed(lambda wanted=wanted: grammars.start(wanted))[1])
        show(f"compile, {name}", times)
    state = grammars.start(COMPACT)
    ids = tokenizer.encode(json.dumps(PERSON, separators=(",", ":")), add_special_tokens=False)
    bits = np.zeros((9, -(-size // 32)), np.int32)
    masks, drafts, spans, follows = [], [], [], []
    for place in range(len(ids)):
        offer = ids[place : place + 8]
        drafts.append(timed(lambda offer=offer: state.allowed_prefix(offer))[1])
        masks.append(timed(lambda: state.write_masks([], bits[:1]))[1])
        spans.append(timed(lambda offer=offer: state.write_masks(offer, bits))[1])
        follows.append(timed(lambda place=place: state.sync(ids[: place + 1]))[1])
    show("mask of one row", masks)
    show("masks of nine rows, and back", spans)
    show("which of 8 drafts are allowed", drafts)
    show("following a token", follows)


def measure_masking(vocab_size: int = 49152) -> None:
    """Times of masking logits, by backend."""
    from surefoot.kernels.cpu.backend import NativeBackend
    from surefoot.kernels.cpu.build import native_unavailable

    native = None if native_unavailable() else NativeBackend(torch.float32)
    for rows in (1, 9):
        logits = torch.randn(rows, vocab_size)
        words = torch.randint(-(2**31), 2**31, (rows, vocab_size // 32), dtype=torch.int64)
        own, one = torch.arange(rows), torch.ones(rows, dtype=torch.int64)
        masks = TokenMasks(words.to(torch.int32), 1, own, own, one)
        for name, work in (("torch", mask_tokens), ("native", native and native.mask_tokens)):
            if work:
                times = [timed(lambda w=work, x=logits, m=masks: w(x, m))[1] for _ in range(50)]
                show(f"mask {rows} rows of logits, {name}", times)


def sample_texts(model: str, runs: int) -> None:
    """Texts by ``SCHEMA`` with speculation and without."""
    from surefoot import LLM, SamplingParams

    message = f"Describe a person as JSON, like {json.dumps(PERSON, separators=(',', ':'))}"
    talks: Any = [[{"role": "user", "content": message}]] * runs
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=200, logprobs=0, structured_outputs=COMPACT
        )
        for seed in range(runs)
    ]
    llm = LLM(model, max_model_len=1024, max_num_seqs=8, draft_policy="fixed")
    texts = {}
    for method in ("auto", "off"):
        begun = time.perf_counter()
        texts[method] = [item.outputs[0] for item in llm.chat(talks, params, speculation=method)]
        seconds = time.perf_counter() - begun
        outputs = texts[method]
        whole = sum(output.finish_reason == "stop" for output in outputs)
        tokens = sum(len(output.token_ids) for output in outputs)
        verified = sum(output.speculation.verified for output in outputs)
        accepted = sum(output.speculation.accepted for output in outputs)
        for output in outputs:
            if output.finish_reason == "stop":
                json.loads(output.text)
        print(
            f"{method}: {whole} of {runs} whole, {tokens} tokens, {tokens / seconds:.1f} tokens/s, "
            f"{accepted} of {verified} drafts accepted"
        )
    pairs = list(zip(texts["auto"], texts["off"], strict=True))
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    gaps = [
        abs(x.logprob - y.logprob)
        for a, b in pairs
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=False)
    ]
    print(f"{same} of {runs} texts the same; logprobs differ by {max(gaps):.1e} at most")


def compare_forced(model: str, runs: int) -> None:
    """What drafts of forced text bring, with white space between JSON's tokens and without."""
    from surefoot import LLM, SamplingParams

    llm = LLM(model, max_model_len=1024, max_num_seqs=1)
    methods = ("auto", *llm.engine.proposer_names, "off")
    example = json.dumps(PERSON, separators=(",", ":"))
    tasks = {
        "told the keys": "Describe an invented person as JSON with name, age, email, tags, address",
        "shown an object": f"Describe another person as JSON, like {example}",
    }
    for style, wanted in {
        "spaced": StructuredOutputsParams(json=SCHEMA),
        "compact": COMPACT,
    }.items():
        for task, message in tasks.items():
            tokens, rounds, seconds, drafted = (dict.fromkeys(methods, 0.0) for _ in range(4))
            for seed in range(runs + 1):
                params = SamplingParams(
                    temperature=0.8, seed=seed, max_tokens=160, structured_outputs=wanted
                )
                texts = set()
                for turn in range(len(methods)):
                    method = methods[(seed + turn) % len(methods)]
                    begun = time.perf_counter()
                    talk: Any = [{"role": "user", "content": message}]
                    [answer] = llm.chat([talk], params, speculation=method)
                    took, output = time.perf_counter() - begun, answer.outputs[0]
                    texts.add(tuple(output.token_ids))
                    if not seed:
                        continue  # The first one warms up.
                    tokens[method] += len(output.token_ids)
                    rounds[method] += output.speculation.rounds
                    seconds[method] += took
                    drafted[method] += output.speculation.accepted_by_proposer.get("grammar", 0)
                assert len(texts) == 1, "texts differ"
            print(f"{style}, {task}: {tokens['off'] / runs:.0f} tokens a text")
            for method in methods:
                pace = seconds["off"] / seconds[method]
                print(
                    f"  {method:8} {tokens[method] / rounds[method]:.2f} tokens a round, "
                    f"{drafted[method] / tokens[method]:.0%} of them forced drafts, "
                    f"{pace:.2f} times the pace of plain decoding"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--forced", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.forced:
        compare_forced(arguments.model, arguments.forced)
        return
    measure_grammars(arguments.model)
    measure_masking()
    if arguments.runs:
        sample_texts(arguments.model, arguments.runs)


if __name__ == "__main__":
    main()
