"""Small random models and tokenizers, for tests."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from surefoot.models.config import ModelConfig
from surefoot.models.decoder import expected_shapes

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the cat sat on the mat and the dog ate the hat", "surefoot goes step by step, 1234"]


def tiny_config(arch: str, **overrides: Any) -> ModelConfig:
    """Two layers, 4 heads of 16 over 2 KV heads, hidden 64, vocabulary 99."""
    base = ModelConfig(
        architecture=arch,
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        max_positions=512,
        norm_eps=1e-6,
        rope_theta=10000.0,
        attention_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    return replace(base, **overrides)


def tiny_weights(
    arch: str = "llama", seed: int = 0, **overrides: Any
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """(config, float32 weights) of a random model whose greedy text is varied."""
    config = tiny_config(arch, **overrides)
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config)
    return config, {name: random_tensor(name, shapes[name], generator) for name in shapes}


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms near 1, small biases, and linears that outweigh the residual stream, so that the next
    token depends on more than the last one."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "lm_head" in name:
        return noise
    if "lm_head" in name:
        return noise
    if "embed_tokens" in name:
        # Small, so that a tied head does not just repeat the last token.
        return 0.15 * noise
    # Sharp attention (q, k) lets distant tokens matter.
    gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.5
    return gain * noise / shape[-1] ** 0.5


@lru_cache
def tiny_tokenizer_json() -> str:
    """A byte-level BPE tokenizer of 288 tokens: three special ones, all bytes, some merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer.to_str()


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def tiny_hf_model(
    arch: str,
    tmp_path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """A folder with a random model saved by transformers, and its tokenizer.

    ``overrides`` are keys of the transformers config. Returns the folder, a new one in
    ``tmp_path`` for every call.
    """
    model = tiny_hf_module(arch, seed=seed, **overrides).to(dtype)
    folder = tmp_path / f"{arch}-{len(list(tmp_path.iterdir()))}"
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return write_tokenizer(folder)


def tiny_hf_module(arch: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model itself, in float32 and evaluation mode."""
    import transformers

    settings = {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if arch == "qwen2":
        del settings["head_dim"]
    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    config = getattr(transformers, prefix + "Config")(**{**settings, **overrides})
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_tensor(name, tuple(parameter.shape), generator))
    return model


def tiny_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write ``weights`` (Hugging Face names) as llama.cpp's converter would.

    ``kind`` is the type of the matrices; K-quants, which the gguf library cannot write, get random
    blocks instead of ``weights``. ``metadata`` overrides keys by their full name, None dropping
    one; ``tensors`` adds float32 tensors by their GGUF name.
    """
    import gguf
    import numpy as np

    arch = config.architecture
    keys: dict[str, Any] = {
        f"{arch}.block_count": config.layers,
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        **tiny_gguf_vocabulary(),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    quantization = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(seed)
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if arch == "llama" and part in name:
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        elif kind.endswith("_K"):
            blocks = random_k_blocks(kind, array.size // 256, random)
            blocks = blocks.reshape(array.shape[0], -1)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=quantization)
        else:
            data = gguf.quants.quantize(array, quantization)
            writer.add_tensor(gguf_name(name), data, raw_dtype=quantization)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(extra, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf_vocabulary() -> dict[str, Any]:
    """The tokenizer of ``tiny_tokenizer_json`` as GGUF metadata."""
    tokenizer = json.loads(tiny_tokenizer_json())
    vocabulary = tokenizer["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in SPECIALS else 1 for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    renamed = {
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return name


def random_k_blocks(kind: str, count: int, random: Any) -> Any:
    """uint8 [count, bytes] of random K-quant blocks with small finite scales."""
    import numpy as np

    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    scales = random.uniform(1e-3, 2e-3, (count, 2)).astype(np.float16).view(np.uint8)
    # Q4_K and Q5_K begin with two fp16 scales, Q6_K ends with one.
    if kind == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks
