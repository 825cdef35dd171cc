"""From a configuration to an engine: pick the backend and the weights, load, plan memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.engine.pool_size import model_length
from surefoot.errors import SurefootError
from surefoot.kernels.backend import Backend
from surefoot.kernels.cpu.processor import processor_lines
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.models.loading import Checkpoint, load_checkpoint
from surefoot.sampling.grammar import Grammars
from surefoot.speculation.round import Round
from surefoot.speculation.shipped import with_shipped

logger = logging.getLogger(__name__)
_TORCH_THREADS = torch.get_num_threads()
"""What torch found fit for this machine, before any engine changed it."""
ProgressCallback = Callable[[str, int, int], None]


def build_engine(
    config: EngineConfig,
    progress: ProgressCallback | None = None,
    prepare: Callable[[Round], None] | None = None,
) -> tuple[Engine, Checkpoint]:
    """Load ``config.model`` and build an engine around it, with the drafter that is shipped for it;
    ``prepare`` as there."""
    config = with_shipped(config)
    torch.set_num_threads(config.threads or _TORCH_THREADS)
    backend = choose_backend(config)
    checkpoint = load_checkpoint(
        config.model,
        dtype=backend.dtype,
        native=config.weights_on(backend.name) == "native",
        generation_config=config.generation_config,
        progress=progress,
    )
    if checkpoint.sampling_defaults.values:
        logger.info("%s", checkpoint.sampling_defaults)
    max_model_len = model_length(config, checkpoint.config)
    decoder = Decoder(checkpoint.config, checkpoint.weights, backend, max_model_len)
    engine = Engine(decoder, config, prepare=prepare)
    model = checkpoint.config
    engine.grammars = Grammars(checkpoint.tokenizer, model.vocab_size, model.eos_token_ids)
    return engine, checkpoint


def choose_backend(config: EngineConfig) -> Backend:
    """The compiled CPU kernels where they can be had, else plain torch; refuses a backend that
    was asked for and cannot be had, with the reason."""
    device = _device(config.device)
    if device.type == "cuda":
        return _gpu_backend(config, device)
    if config.backend == "triton":
        raise SurefootError("backend", "triton needs an NVIDIA GPU", "use --device cuda")
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


def why_slow(engine: Engine) -> str | None:
    """One line if ``auto`` found no compiled kernels for this CPU, else None."""
    backend = engine.decoder.backend
    if engine.config.backend != "auto" or backend.name != "torch" or backend.device.type != "cpu":
        return None
    from surefoot.kernels.cpu.build import native_unavailable

    return f"compiled kernels would make this several times faster: {native_unavailable()}"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SurefootError("device", f"{name!r} is not supported", "use cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise SurefootError("device", "there is no usable NVIDIA GPU here", "use cpu")
        if (device.index or 0) >= count:
            raise SurefootError("device", f"{name!r} is not one of {count} GPUs")
        device = torch.device("cuda", device.index or 0)
    return device


def _gpu_backend(config: EngineConfig, device: torch.device) -> Backend:
    """The Triton kernels, or plain torch on the GPU if that was asked for."""
    if config.backend == "native" or config.weights == "native":
        option = "backend" if config.backend == "native" else "weights"
        raise SurefootError(option, "native kernels run on a CPU only", "use --device cpu")
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    torch.cuda.set_device(device.index or 0)
    if config.backend == "torch":
        return TorchBackend(device, dtype)
    try:
        from surefoot.kernels.triton.backend import TritonBackend
    except ImportError as error:
        raise SurefootError("backend", f"triton cannot be imported: {error}") from None
    return TritonBackend(device, dtype)


def _dtype(name: str, native: bool) -> torch.dtype:
    """bfloat16 where it is fast: the compiled kernels widen it on the fly, so that it halves the
    memory traffic on every CPU; torch needs instructions for it."""
    if name == "auto":
        name = "bfloat16" if native or _has_bf16_instructions() else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _has_bf16_instructions() -> bool:
    flags = " ".join(processor_lines("flags", "Features")).split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))
