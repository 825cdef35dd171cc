"""Weights of a GGUF file under Hugging Face names, dense or in their own blocks."""

from __future__ import annotations

import re
from functools import partial

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import BYTES_PER_BLOCK, QuantTensor
from surefoot.models.config import ModelConfig
from surefoot.models.loading.gguf_container import GgufFile, GgufTensor
from surefoot.models.loading.lazy import LazyTensor, LazyWeights, finite
from surefoot.models.registry import by_name

DENSE_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = (*DENSE_KINDS, "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# rope_freqs is read with the config; attn_rot_embd holds frequencies that old files repeat.
IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def open_gguf_weights(
    file: GgufFile, config: ModelConfig, dtype: torch.dtype, native: bool = False
) -> LazyWeights:
    """Tensors by canonical name. Dense ones come in ``dtype``, dequantized in fp32 and rounded
    once; with ``native`` Q8_0, Q4_0 and Q4_1 matrices stay ``QuantTensor``.

    Rows of q and k that the format reorders are put back. Raises SurefootError for tensors of
    other types, and for tensors that the architecture does not know.
    """
    permuted = by_name(config.architecture).gguf_permutes_qk
    tensors, unknown, unsupported = {}, [], set()
    for tensor in file.tensors.values():
        if IGNORED.fullmatch(tensor.name):
            continue
        name = canonical_name(tensor.name)
        if name is None:
            unknown.append(tensor.name)
            continue
        if tensor.kind not in KINDS:
            unsupported.add(tensor.kind)
        heads = 0
        if permuted and ".q_proj." in name:
            heads = config.heads
        elif permuted and ".k_proj." in name:
            heads = config.kv_heads
        if heads and tensor.shape[0] % (2 * heads):
            raise file.broken(f"{tensor.name} has {tensor.shape[0]} rows for {heads} heads")
        keep = native and tensor.kind in BYTES_PER_BLOCK and len(tensor.shape) == 2
        target = None if keep else dtype
        tensors[name] = LazyTensor(tensor.shape, partial(read_tensor, file, tensor, heads, target))
    if unsupported:
        raise SurefootError(
            "model",
            f"{file.path} has tensors in {', '.join(sorted(unsupported))}, not supported",
            "supported: " + ", ".join(KINDS),
        )
    if unknown:
        raise SurefootError(
            "model",
            f"{file.path} has tensors that {config.architecture} does not use: "
            + ", ".join(sorted(unknown)[:5]),
        )
    return LazyWeights(tensors)


def canonical_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor name; None when there is none."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = BLOCK_TENSOR.fullmatch(name)
    if match is None or match[2] not in BLOCK_NAMES:
        return None
    return f"model.layers.{int(match[1])}.{BLOCK_NAMES[match[2]]}.{match[3]}"


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows, [rows, ...]: within each head it interleaves the
    two halves (pair j of RoPE in rows 2j and 2j + 1); Hugging Face's keeps them apart."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The opposite of ``unpermute``."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def read_tensor(
    file: GgufFile, tensor: GgufTensor, heads: int, dtype: torch.dtype | None
) -> Weight:
    """A tensor of one of ``KINDS``. ``heads``: of a matrix of queries or keys whose rows the format
    reorders, otherwise 0. ``dtype`` None: keep the blocks. SurefootError for what is no number."""
    return finite(_read(file, tensor, heads, dtype), tensor.name, file.path)


def _read(file: GgufFile, tensor: GgufTensor, heads: int, dtype: torch.dtype | None) -> Weight:
    raw = file.raw(tensor)
    if tensor.kind in DENSE_KINDS:
        values = raw.flatten().view(DENSE_KINDS[tensor.kind]).view(tensor.shape)
        values = unpermute(values, heads) if heads else values
        return values.to(dtype or torch.float32)
    # A block never spans rows, so reordering rows of bytes reorders rows of weights.
    raw = unpermute(raw, heads) if heads else raw
    if dtype is None:
        return QuantTensor(tensor.kind, raw.contiguous(), tensor.shape[-1])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(raw.numpy(), GGMLQuantizationType[tensor.kind])
    return torch.from_numpy(values).view(tensor.shape).to(dtype)
