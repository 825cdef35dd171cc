"""From a configuration to an engine: pick the backend and the weights, load, plan memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine, model_length
from surefoot.errors import SurefootError
from surefoot.kernels.backend import Backend
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.models.loading import Checkpoint, load_checkpoint
from surefoot.sampling.grammar import Grammars

_TORCH_THREADS = torch.get_num_threads()
"""What torch found fit for this machine, before any engine changed it."""
ProgressCallback = Callable[[str, int, int], None]


def build_engine(
    config: EngineConfig, progress: ProgressCallback | None = None
) -> tuple[Engine, Checkpoint]:
    """Load ``config.model`` and build an engine around it."""
    if config.device != "cpu":
        raise SurefootError("device", f"{config.device!r} is not supported", "use cpu")
    torch.set_num_threads(config.threads or _TORCH_THREADS)
    backend = choose_backend(config)
    native_weights = config.weights == "native" or (
        config.weights == "auto" and backend.name == "native"
    )
    checkpoint = load_checkpoint(
        config.model, dtype=backend.dtype, native=native_weights, progress=progress
    )
    max_model_len = model_length(config, checkpoint.config)
    decoder = Decoder(checkpoint.config, checkpoint.weights, backend, max_model_len)
    engine = Engine(decoder, config)
    model = checkpoint.config
    engine.grammars = Grammars(checkpoint.tokenizer, model.vocab_size, model.eos_token_ids)
    return engine, checkpoint


def choose_backend(config: EngineConfig) -> Backend:
    """The compiled CPU kernels where they can be had, else plain torch; refuses a backend that
    was asked for and cannot be had, with the reason."""
    from surefoot.kernels.cpu.backend import NativeBackend
    from surefoot.kernels.cpu.build import native_unavailable

    reason = None if config.backend == "torch" else native_unavailable()
    if config.backend == "torch" or (config.backend == "auto" and reason is not None):
        if config.weights == "native":
            raise SurefootError("weights", f"native kernels cannot be had: {reason}", "use dense")
        return TorchBackend("cpu", _dtype(config.dtype, native=False))
    if reason is not None:
        raise SurefootError("backend", f"native kernels cannot be had: {reason}", "use torch")
    threads = config.threads or _TORCH_THREADS
    backend = NativeBackend(_dtype(config.dtype, native=True), threads)
    # What is left to torch is small, and waking its own threads for it pushes the kernels'
    # threads, which wait for the next layer, off their CPUs: rounds of 72 rows took five times
    # as long.
    torch.set_num_threads(1)
    return backend


def _dtype(name: str, native: bool) -> torch.dtype:
    """bfloat16 where it is fast: the compiled kernels widen it on the fly, so that it halves the
    memory traffic on every CPU; torch needs instructions for it."""
    if name == "auto":
        name = "bfloat16" if native or _has_bf16_instructions() else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _has_bf16_instructions() -> bool:
    if not os.path.exists("/proc/cpuinfo"):
        return False
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))
