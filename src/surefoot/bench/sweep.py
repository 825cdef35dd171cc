"""Throughput against concurrency on one engine: plain, fixed draft lengths, auto.

Each point keeps ``c`` requests decoding and measures from the round in which all of them decode to
the first that ends: tokens a second and the time of a round; and end to end, prefill included.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from surefoot.bench import synthetic
from surefoot.config import DEFAULT_MODEL, EngineConfig
from surefoot.engine.build import build_engine, choose_backend
from surefoot.engine.engine import Engine
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights
from surefoot.models.loading.hf_config import read_hf_config
from surefoot.request import SamplingParams, SpeculationParams

Mode = int | str
"""A fixed number of drafts, or ``auto``; 0 is plain decoding without proposers."""


@dataclass(frozen=True)
class Point:
    """One measurement: ``round_ms`` is the mean time between verdicts in the steady state."""

    concurrency: int
    mode: str
    tokens_per_s: float
    round_ms: float
    accepted_length: float
    drafts_per_round: float
    end_to_end_per_s: float


def run_point(
    engine: Engine, concurrency: int, mode: Mode, prompt: int, output: int, seed: int = 0
) -> Point:
    """``concurrency`` random prompts of ``prompt`` tokens, ``output`` greedy tokens each."""
    chooser = random.Random(seed)
    vocab = engine.decoder.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    if mode == "auto":
        engine.controller.policy, wish = "auto", SpeculationParams()
    elif mode == 0:
        engine.controller.policy, wish = "auto", SpeculationParams("off")
    else:
        engine.controller.policy, wish = "fixed", SpeculationParams("auto", int(mode))
    requests = [
        engine.make_request(
            f"{mode}-{concurrency}-{seed}-{index}",
            [chooser.randrange(vocab) for _ in range(prompt)],
            params,
            wish,
        )
        for index in range(concurrency)
    ]
    begun = time.perf_counter()
    for request in requests:
        engine.add(request)
    while any(not request.output for request in requests):
        engine.step()
    # The first rounds record what was not recorded yet.
    for _ in range(4):
        engine.step()
    before = sum(len(request.output) for request in requests)
    counted = [engine.stats.rounds, engine.stats.draft_rows]
    started = time.perf_counter()
    now, tokens, rounds, drafts = started, 0, 0, 0
    while not any(request.finished for request in requests):
        engine.step()
        if not any(request.finished for request in requests):
            now = time.perf_counter()
            tokens = sum(len(request.output) for request in requests) - before
            rounds = engine.stats.rounds - counted[0]
            drafts = engine.stats.draft_rows - counted[1]
    while engine.has_work:
        engine.step()
    ended = time.perf_counter()
    seconds, rounds = max(now - started, 1e-9), max(rounds, 1)
    return Point(
        concurrency=concurrency,
        mode=str(mode),
        tokens_per_s=tokens / seconds,
        round_ms=1000 * seconds / rounds,
        accepted_length=tokens / rounds / concurrency,
        drafts_per_round=drafts / rounds,
        end_to_end_per_s=concurrency * output / (ended - begun),
    )


def sweep(
    engine: Engine,
    concurrencies: Sequence[int],
    modes: Sequence[Mode],
    prompt: int = 512,
    output: int = 256,
) -> list[Point]:
    """Every mode at every concurrency."""
    return [
        run_point(engine, concurrency, mode, prompt, output)
        for concurrency in concurrencies
        for mode in modes
    ]


def main() -> None:
    """``python -m surefoot.bench.sweep``: an engine on one GPU, with random weights or a model's;
    a table on stdout, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model, as for surefoot generate")
    parser.add_argument(
        "--dummy-weights", metavar="FOLDER", help="random weights for its config.json"
    )
    parser.add_argument("--synthetic-acceptance", metavar="R1,R2,…", help="unconditional rates")
    parser.add_argument(
        "--proposer", help="whose drafts those are: name=path, or name=dummy for random weights"
    )
    parser.add_argument("--concurrency", default="1,4,8,16,32,64,128")
    parser.add_argument("--modes", default="0,4,auto", help="fixed numbers of drafts, or auto")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--max-draft-tokens", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.dummy_weights is None):
        parser.error("give either --model or --dummy-weights")
    counts = [int(count) for count in arguments.concurrency.split(",")]
    modes: list[Mode] = [m if m == "auto" else int(m) for m in arguments.modes.split(",")]
    rates = [float(rate) for rate in (arguments.synthetic_acceptance or "").split(",") if rate]
    if rates:
        synthetic.register()
    config = EngineConfig(
        model=arguments.model or DEFAULT_MODEL,
        device=arguments.device,
        max_model_len=arguments.prompt + arguments.output,
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(2048, *counts),
        max_draft_tokens=arguments.max_draft_tokens,
        proposers=(arguments.proposer or synthetic.NAME,) if rates else None,
        enable_prefix_caching=False,
    )
    engine = _engine(config, arguments.dummy_weights)
    if rates and engine.pipeline is None:
        parser.error("--synthetic-acceptance needs recorded rounds, so a GPU")
    if rates:
        synthetic.accept(engine, rates, counts)
    points = []
    for concurrency in counts:
        for mode in modes:
            point = run_point(engine, concurrency, mode, arguments.prompt, arguments.output)
            points.append(asdict(point))
            print(
                f"{concurrency:4} {mode!s:>5} {point.tokens_per_s:9.0f} tokens/s "
                f"{point.round_ms:7.2f} ms a round, accepted length {point.accepted_length:.2f}, "
                f"end to end {point.end_to_end_per_s:.0f}",
                flush=True,
            )
    print(json.dumps({"config": asdict(config), "rates": rates, "points": points}))


def _engine(config: EngineConfig, dummy: str | None) -> Engine:
    if dummy is None:
        return build_engine(config)[0]
    backend = choose_backend(config)
    shape = read_hf_config(Path(dummy))
    weights = DummyWeights(shape, backend.device, backend.dtype)
    return Engine(Decoder(shape, weights, backend, config.max_model_len), config)


if __name__ == "__main__":
    main()
