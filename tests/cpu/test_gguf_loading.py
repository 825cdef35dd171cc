"""GGUF files written by the gguf library are read back; what cannot be honoured is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from surefoot.errors import SurefootError
from surefoot.kernels.quant import QuantTensor
from surefoot.models.config import RopeScaling
from surefoot.models.decoder import check_tensors
from surefoot.models.loading import inspect_model, load_checkpoint
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_file import KINDS
from tiny_models import gguf_name, tiny_gguf, tiny_gguf_vocabulary, tiny_weights

ARCHES = ["llama", "qwen2", "qwen3"]
BIG = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "layers": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))


def make(path: Path, arch: str = "llama", **options: Any) -> Path:
    """A tiny GGUF file; ``options`` are those of ``tiny_gguf`` and of ``tiny_weights``."""
    written = {key: options.pop(key) for key in ("kind", "metadata", "tensors") if key in options}
    config, weights = tiny_weights(arch, **{"vocab_size": 288, **options})
    return tiny_gguf(path / "model.gguf", config, weights, **written)


def load(path: Path, **options: Any) -> Any:
    return load_checkpoint(str(path), **{"dtype": torch.float32, **options})


def refusal(path: Path) -> str:
    with pytest.raises(SurefootError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def dense(weight: Any) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_config_come_back(arch: str, tied: bool, tmp_path: Path) -> None:
    biases = {"attention_bias": True, "output_bias": True} if arch == "llama" else {}
    config, weights = tiny_weights(arch, vocab_size=288, tied_embeddings=tied, **biases)
    checkpoint = load(tiny_gguf(tmp_path / "model.gguf", config, weights))
    assert checkpoint.config == config.__class__(**{**vars(config), "eos_token_ids": (2, 0)})
    assert set(checkpoint.weights) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(checkpoint.weights[name], tensor), name


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type(kind: str, arch: str, tmp_path: Path) -> None:
    """Against the gguf library's own dequantization, rows of q and k put back by hand."""
    config, weights = tiny_weights(arch, vocab_size=288, **BIG)
    path = tiny_gguf(tmp_path / "model.gguf", config, weights, kind=kind)
    native, plain = load(path, native=True), load(path)
    half = load(path, dtype=torch.bfloat16)
    check_tensors(config, native.weights)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in weights:
        tensor = stored[gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = torch.from_numpy(values.copy())
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = range(expected.shape[0])
            order = [r // 64 * 64 + (r % 64 % 32) * 2 + r % 64 // 32 for r in rows]
            expected = expected[order]
        assert torch.equal(plain.weights[name], expected), name
        assert torch.equal(half.weights[name], expected.bfloat16()), name
        blocks = kind in ("Q8_0", "Q4_0", "Q4_1") and expected.ndim == 2
        assert isinstance(native.weights[name], QuantTensor) == blocks
        assert torch.equal(dense(native.weights[name]), expected), name
        if not kind.endswith("_K"):
            assert (expected - weights[name]).abs().max() < 0.15 * weights[name].abs().max()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("native", [True, False])
def test_weights_that_are_no_numbers_are_refused(kind: str, native: bool, tmp_path: Path) -> None:
    """The scale of one block (Q4_1: its offset) is NaN: packed blocks are looked at, too."""
    config, weights = tiny_weights("llama", **{"vocab_size": 288, **BIG})
    path = tiny_gguf(tmp_path / "model.gguf", config, weights, kind=kind)
    tensor = GgufFile(path).tensors["blk.0.ffn_up.weight"]
    at = tensor.offset + tensor.size // 2 + {"Q4_1": 2, "Q6_K": 208}.get(kind, 0)
    content = bytearray(path.read_bytes())
    content[at : at + 2] = b"\x00\x7e"
    path.write_bytes(content)
    with pytest.raises(SurefootError, match=r"blk.0.ffn_up.weight in .*model.gguf holds NaN"):
        dict(load(path, native=native).weights)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


def test_container_equals_the_library_reader(tmp_path: Path) -> None:
    path = make(tmp_path, kind="Q8_0", metadata={"x.floats": [0.5, 1e-5], "x.flags": [True, False]})
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, field in fields.items():
        assert ours.metadata[key] == pytest.approx(field.contents()), key
    assert ours.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.offset, mine.size) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    assert f"{path} is no usable GGUF file: it ends at byte" in refusal(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    assert "does not start with GGUF" in refusal(path)
    path.write_bytes(whole[:4] + b"\x01\0\0\0" + whole[8:])
    assert "version is 1" in refusal(path)
    path.write_bytes(b"")
    assert "cannot read" in refusal(path)


def test_every_cut_of_the_header_is_noticed(tmp_path: Path) -> None:
    path = make(tmp_path, layers=1)
    whole = path.read_bytes()
    for cut in range(0, GgufFile(path).data_start, 97):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(SurefootError):
            GgufFile(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "Q5_1"}, "tensors in Q5_1, not supported; supported: F32, F16, BF16, Q8_0"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": [1.0]}}, "does not use: blk.0.ffn_gate_exps"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count of"),
        ({"metadata": {"llama.attention.sliding_window": 64}}, "is 64, which is not supported"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "differs from the head size of 16"),
        ({"metadata": {"llama.block_count": None}}, "llama.block_count of"),
        ({"metadata": {"llama.block_count": "2"}}, "is '2', expected a positive integer"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, "it differs by layer"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "supported: none, linear, yarn"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.factor of"),
        ({"metadata": {"split.count": 3}}, "one part of a split GGUF file; merge"),
        ({"metadata": {"tokenizer.ggml.pre": "tekken"}}, "'tekken', which is not supported"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "'bert', which is not supported"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a", "a"]}}, "names a token twice"),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, "no tokenizer.ggml.tokens"),
        ({"metadata": {"tokenizer.ggml.merges": None}}, "no tokenizer.ggml.merges"),
        ({"metadata": {"tokenizer.ggml.merges": ["zq qz"]}}, "do not fit its vocabulary"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict, message: str, tmp_path: Path) -> None:
    assert message in refusal(make(tmp_path, **options))


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "'mamba' is not supported; supported architectures: llama" in refusal(
        tmp_path / "x.gguf"
    )


def test_biases_an_architecture_lacks_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen2", tensors={"blk.0.attn_output.bias": [0.0] * 64})
    assert "attn_output biases" in refusal(path)


def test_missing_biases_are_noticed(tmp_path: Path) -> None:
    checkpoint = load(make(tmp_path, "qwen2", attention_bias=False))
    with pytest.raises(SurefootError, match=r"q_proj\.bias is missing"):
        check_tensors(checkpoint.config, checkpoint.weights)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
USUAL = 1 + 0.1 * math.log(4)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeScaling()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        (YARN, RopeScaling("yarn", 4.0, 512, attention_factor=USUAL)),
        (
            {
                **YARN,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.attn_factor": 0.5,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeScaling("yarn", 4.0, 128, attention_factor=0.5 * USUAL, beta_fast=16.0),
        ),
        (
            {**YARN, "rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_attn_factor": 3.0},
            RopeScaling("yarn", 4.0, 512, attention_factor=1.5 * USUAL),
        ),
    ],
)
def test_rope_metadata(keys: dict, scaling: RopeScaling, tmp_path: Path) -> None:
    path = make(tmp_path, "qwen2", metadata={f"qwen2.{key}": keys[key] for key in keys})
    assert load(path).config.rope_scaling == scaling


def test_rope_factors(tmp_path: Path) -> None:
    path = make(tmp_path, tensors={"rope_freqs.weight": [1, 1, 1, 2, 4, 8, 8, 8]})
    checkpoint = load(path)
    assert checkpoint.config.rope_scaling == RopeScaling(
        frequency_factors=(1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
    )
    assert "rope_freqs.weight" not in checkpoint.weights
    for kind in ("linear", "yarn"):
        keys = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
        tensors = {"rope_freqs.weight": [1.0] * 7 + [8.0]}
        scaling = load(make(tmp_path, tensors=tensors, metadata=keys)).config.rope_scaling
        assert (scaling.kind, scaling.frequency_factors) == (kind, (1.0,) * 7 + (8.0,))
    assert "rope_freqs.weight is F32 of shape" in refusal(
        make(tmp_path, tensors={"rope_freqs.weight": [1.0, 2.0]})
    )


def test_end_tokens(tmp_path: Path) -> None:
    vocabulary = tiny_gguf_vocabulary()
    pieces = list(vocabulary["tokenizer.ggml.tokens"])
    kinds = list(vocabulary["tokenizer.ggml.token_type"])
    pieces[50], kinds[50] = "<|eot_id|>", 3
    pieces[51], kinds[51] = "<|end|>", 1  # ordinary text that only looks like one
    extra = {
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a t"],
        "tokenizer.ggml.eot_token_id": 7,
    }
    assert load(make(tmp_path, metadata=extra)).config.eos_token_ids == (2, 7, 0, 50)


def test_inspection(tmp_path: Path) -> None:
    path = make(tmp_path, kind="Q8_0", tied_embeddings=True)
    facts = inspect_model(str(path))
    config, weights = tiny_weights("llama", vocab_size=288, tied_embeddings=True)
    assert facts["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert facts["tensor_types"] == {"Q8_0": 15, "F32": 5}
    assert [token["text"] for token in facts["eos_tokens"]] == ["<|im_end|>", "<|endoftext|>"]
    assert facts["file_bytes"] == path.stat().st_size
    assert facts["context_length"] == config.max_positions
    assert json.loads(json.dumps(facts)) == facts


def test_embedded_model(smollm2: Any) -> None:
    config = smollm2.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.eos_token_ids == (2, 0)
    assert config.tied_embeddings
    check_tensors(config, smollm2.weights)
    kinds = {weight.kind for weight in smollm2.weights.values() if hasattr(weight, "kind")}
    assert kinds == {"Q4_1", "Q8_0"}
