"""A model ready to be packed by a backend: config, weights and tokenizer from any source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.cache import Progress
from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.models.config import ModelConfig
from surefoot.models.loading.converted import SAFETENSORS_TYPES, cached_dense
from surefoot.models.loading.gguf_config import read_gguf_config
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_file import DENSE_KINDS, open_gguf_weights
from surefoot.models.loading.hf_config import read_hf_config
from surefoot.models.loading.resolve import resolve_model
from surefoot.models.loading.safetensors_dir import open_safetensors
from surefoot.models.loading.sampling_defaults import (
    SamplingDefaults,
    read_gguf_sampling,
    read_hf_sampling,
)
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.models.loading.tokenizer_source import tokenizer_of


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model. ``weights`` maps the names of ``decoder.expected_shapes`` to dense tensors
    in the dtype asked for, or to GGUF blocks; each look-up reads from disk."""

    name: str
    config: ModelConfig
    weights: Mapping[str, Weight]
    tokenizer: Tokenizer
    sampling_defaults: SamplingDefaults
    """What the checkpoint recommends, unless loading was told not to ask."""
    source: Path
    chat_template: str | None


def load_checkpoint(
    model: str,
    *,
    dtype: torch.dtype,
    native: bool = False,
    generation_config: str = "auto",
    progress: Progress | None = None,
) -> Checkpoint:
    """Load an embedded model by name, a Hugging Face folder, a GGUF file, or a hub repository
    (``org/name``, ``org/name:file.gguf``).

    ``dtype`` is that of dense tensors: float32, float16 or bfloat16. ``native`` leaves Q8_0, Q4_0
    and Q4_1 matrices of GGUF files in their blocks; otherwise they are converted once and the
    result is cached. ``generation_config`` "none": leave the checkpoint's sampling defaults alone,
    be they wrong. ``progress(label, done, total)`` hears of downloads and conversions. Raises
    SurefootError for everything that a user can put right.
    """
    if dtype not in SAFETENSORS_TYPES:
        raise SurefootError("dtype", f"{dtype} is not supported", "use float32, float16, bfloat16")
    source = resolve_model(model, progress)
    defaults = SamplingDefaults()
    if not source.gguf:
        config, weights = open_safetensors(source.path, read_hf_config(source.path), dtype)
        tokenizer = tokenizer_of(source)
        if generation_config == "auto":
            defaults = read_hf_sampling(source.path)
    else:
        file = GgufFile(source.path)
        config, tokenizer = read_gguf_config(file), tokenizer_of(source, file)
        if generation_config == "auto":
            defaults = read_gguf_sampling(file)
        weights = open_gguf_weights(file, config, dtype, native)
        quantized = any(tensor.kind not in DENSE_KINDS for tensor in file.tensors.values())
        if quantized and not native:
            weights = cached_dense(file, weights, dtype, progress)
    return Checkpoint(
        source.name, config, weights, tokenizer, defaults, source.path, tokenizer.chat_template
    )
