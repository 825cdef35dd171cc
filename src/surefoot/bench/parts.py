"""Where the time of a round goes: on a GPU by kernel, elsewhere by part of the decoder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from surefoot.bench.sweep import SETTLING, Load, Mode, drafting, submit, until_all_decode
from surefoot.engine.engine import Engine
from surefoot.request import Request

ROUNDS = 16
GROUPS = {
    "attention": r"^(attention|combine(_chunks)?|chunk|prompt|(tile|chunk)_list)_kernel"
    r"|^path_(keys|places)_kernel|flash|fmha",
    "norm and rope": r"^rms_norm_kernel|^rope_kv_kernel|^silu_mul_kernel",
    "sampling": r"argmax|^survey_kernel|^bound_kernel|^draw_kernel|^final_kernel"
    r"|^(adjust|mask|part_scores|row_scores)_kernel|softmax",
    "control": r"^(split|learn|cut|keep|lay_out|span_table|verdict|lookup|move|write)_kernel"
    r"|^(ancestors|node_rows|walk|follow_paths|write_drafts)_kernel",
    "drafter": r"^(entry_inputs|live_rows|shift|synthetic_tokens|(partial|final)_likeliest)_kernel"
    r"|^(block_rows|convolve|markov|draw_(part|final|several)|branch|best_nodes)_kernel"
    r"|^(markov_pick|noise|changes|(part|final)_several)_kernel",
    "products": (
        r"^(product|rows|tiles|shares|reduce|qkv)_kernel"
        r"|gemm|gemv|nvjet|cutlass|splitk|xmma"
    ),
}
"""Regular expressions on kernels' names, the first that is found counts. ``products`` include the
sums, norms and rotations that are fused with them, the head, and a drafter's products; ``drafter``
is what only drafting needs; what matches none is ``other``."""


def group_of(kernel: str) -> str:
    """The part of a round that a kernel belongs to."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return "other"


def round_parts(
    engine: Engine, concurrency: int, mode: Mode, load: Load, rounds: int = ROUNDS
) -> dict[str, float]:
    """Milliseconds of a round by part, over a few rounds in which all requests decode; empty if
    the requests end before. On a GPU these are times on the device (``attribute``); profiling makes
    rounds a little longer."""
    on_gpu = engine.decoder.backend.device.type == "cuda"
    measure = _by_kernel if on_gpu else _by_call
    with drafting(engine, mode) as wish:
        requests = submit(engine, concurrency, load, wish)
        until_all_decode(engine, requests)
        _step(engine, requests, SETTLING)
        before = engine.stats.rounds
        milliseconds = measure(engine, lambda: _step(engine, requests, rounds))
        done = engine.stats.rounds - before
        while engine.has_work:
            engine.step()
    if not done:
        return {}
    return {part: value / done for part, value in milliseconds.items()}


def _step(engine: Engine, requests: Sequence[Request], rounds: int) -> None:
    for _ in range(rounds):
        if any(request.finished for request in requests):
            return
        engine.step()


def _by_kernel(engine: Engine, run: Callable[[], None]) -> dict[str, float]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    device = engine.decoder.backend.device
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize(device)
    return attribute(
        [
            (event.name, event.time_range.start / 1000, event.time_range.end / 1000)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        ]
    )


def attribute(kernels: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Split the time from the first start to the last end over groups: (kernel, start, end), in any
    unit. Of kernels that overlap, the later one counts from the end of those before it: it has
    waited for them."""
    parts = dict.fromkeys((*GROUPS, "other", "idle"), 0.0)
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    reached = ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        if start > reached:
            parts["idle"] += start - reached
            reached = start
        if end > reached:
            parts[group_of(name)] += end - reached
            reached = end
    return parts


def _by_call(engine: Engine, run: Callable[[], None]) -> dict[str, float]:
    """``layers``: all decoder blocks; ``head``: logits or the likeliest tokens; ``rest``: drawing
    from logits, drafting, book-keeping."""
    parts = {"layers": 0.0, "head": 0.0, "rest": 0.0}
    with _timed(engine.decoder, {"forward": "layers", "greedy": "head", "logits": "head"}, parts):
        begun = time.perf_counter()
        run()
        whole = 1000 * (time.perf_counter() - begun)
    parts["rest"] = whole - parts["layers"] - parts["head"]
    return parts


@contextmanager
def _timed(owner: Any, names: dict[str, str], parts: dict[str, float]) -> Iterator[None]:
    """Add the milliseconds of an object's methods to ``parts``."""

    def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                parts[part] += 1000 * (time.perf_counter() - begun)

        return call

    for name, part in names.items():
        setattr(owner, name, timed(getattr(owner, name), part))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)
