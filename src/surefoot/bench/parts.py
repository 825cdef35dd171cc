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
    "attention": r"^attention_kernel|^combine_kernel|flash|fmha",
    "norm and rope": r"^rms_norm_kernel|^rope_kv_kernel|^silu_mul_kernel",
    "sampling": r"argmax|^narrow_kernel|^limit_kernel|^draw_kernel|^penalties_kernel"
    r"|^bias_and_ends_kernel|softmax",
    "control": r"^(split|learn|keep|lay_out|span_table|verdict|lookup)_kernel",
    "products": r"^rows_kernel|^reduce_kernel|^qkv_kernel|gemm|gemv|nvjet|cutlass|splitk|xmma",
}
"""Regular expressions on kernels' names, the first that is found counts. ``products`` include the
sums, norms and rotations that are fused with them, and the head; what matches none is ``other``."""


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
    the requests end before. On a GPU these are times of kernels on the device: those that overlap
    count in full, and the gaps between them nowhere."""
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
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    parts = dict.fromkeys((*GROUPS, "other"), 0.0)
    for row in profiler.key_averages():
        parts[group_of(row.key)] += row.self_device_time_total / 1000
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
