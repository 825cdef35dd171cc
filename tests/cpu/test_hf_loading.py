"""Hugging Face folders: what transformers writes is read back, what is broken is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.errors import SurefootError
from surefoot.models.config import RopeScaling
from surefoot.models.decoder import check_tensors, expected_shapes
from surefoot.models.loading import inspect_model, list_local_models, load_checkpoint
from tiny_models import tiny_hf_model, tiny_hf_module, tiny_weights

VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "num_hidden_layers": 3}),
    ("llama", {"hidden_size": 32, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 8}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "eos_token_id": [2, 5]}),
]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_checkpoint(str(folder), dtype=dtype)


def edit(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """Change keys of a JSON file; None removes the key."""
    path = folder / file
    data = json.loads(path.read_text()) if path.is_file() else {}
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if changes.get(k, v) is not None}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(SurefootError) as caught:
        checkpoint = load(folder)
        check_tensors(checkpoint.config, checkpoint.weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {arch: tiny_hf_model(arch, root) for arch in ("llama", "qwen2", "qwen3")}


@pytest.fixture
def copy(base: dict[str, Path], tmp_path: Path) -> Any:
    """A function: architecture -> a fresh copy of its folder."""
    import shutil

    return lambda arch: Path(shutil.copytree(base[arch], tmp_path / arch))


@pytest.mark.parametrize(("arch", "overrides"), VARIANTS)
def test_equals_transformers(arch: str, overrides: dict, tmp_path: Path) -> None:
    folder = tiny_hf_model(arch, tmp_path, **overrides)
    model = tiny_hf_module(arch, **overrides)
    checkpoint = load(folder)
    config, theirs = checkpoint.config, model.config
    check_tensors(config, checkpoint.weights)
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (config.tied_embeddings and name == "lm_head.weight")
    }
    assert set(checkpoint.weights) == set(expected) == set(expected_shapes(config))
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.weights[name], tensor), name
    assert config.architecture == arch
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.max_positions == theirs.max_position_embeddings
    assert (config.heads, config.kv_heads) == (4, theirs.num_key_value_heads)
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
    assert config.qk_norm == (arch == "qwen3")
    eos = theirs.eos_token_id
    assert config.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
    assert config.bos_token_id == 1
    assert checkpoint.chat_template is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sharded_and_in_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_hf_model("qwen2", tmp_path, dtype=torch.bfloat16, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    checkpoint, model = load(folder, dtype), tiny_hf_module("qwen2")
    for name, tensor in model.state_dict().items():
        assert checkpoint.weights[name].dtype == dtype
        assert torch.equal(checkpoint.weights[name], tensor.bfloat16().to(dtype)), name
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()
    assert "lacks model-00001-of-" in refusal(folder)


def test_other_dtypes_are_refused(base: dict[str, Path]) -> None:
    with pytest.raises(SurefootError, match=r"^dtype: .*bfloat16"):
        load(base["llama"], torch.float64)


def test_tying(copy: Any) -> None:
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    # Files that hold a different head are not tied, as in transformers.
    edit(folder, tie_word_embeddings=True)
    assert not load(folder).config.tied_embeddings
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    assert load(folder).config.tied_embeddings
    assert "lm_head.weight" not in load(folder).weights
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert load(folder).config.tied_embeddings
    edit(folder, tie_word_embeddings=False)
    assert "lm_head.weight is missing" in refusal(folder)


def test_extra_tensors_and_bare_names(copy: Any) -> None:
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(bare, folder / "model.safetensors")
    weights = load(folder).weights
    assert set(weights) == set(tensors)
    assert weights.shape_of("model.norm.weight") == (64,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "rms_norm_eps": None}, "config.json lacks hidden_size, rms_norm_"),
        ({"architectures": None}, "lacks architectures"),
        ({"hidden_size": "64"}, 'hidden_size = "64"; expected a positive integer'),
        ({"num_hidden_layers": True}, "num_hidden_layers = true; expected"),
        ({"rms_norm_eps": []}, r"rms_norm_eps = []; expected a number"),
        ({"tie_word_embeddings": "no"}, "expected true or false"),
        ({"eos_token_id": "2"}, "expected a token id or a list"),
        ({"num_key_value_heads": 3}, "expected a divisor of 4 heads"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "supported architectures: LlamaForCausalLM, Qwen2",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq' quantization"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' quantization"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' RoPE scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' RoPE scaling"),
        ({"rope_scaling": {"type": "linear"}}, "lacks rope_scaling.factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "RoPE per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"intermediate_size": 128}, "mlp.gate_proj.weight is (96, 64), expected (128, 64)"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_bad_configs_are_refused(changes: dict, message: str, copy: Any) -> None:
    assert message in refusal(edit(copy("llama"), **changes))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_sliding_window(arch: str, copy: Any) -> None:
    folder = copy(arch)
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    assert "sliding_attention layers" in refusal(edit(folder, **window, max_window_layers=1))
    load(edit(folder, **window, max_window_layers=2))
    listed = ["full_attention", "sliding_attention"]
    assert "sliding_attention layers" in refusal(edit(folder, layer_types=listed))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("section", "scaling"),
    [
        ({"rope_type": "default"}, RopeScaling()),
        ({"type": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            RopeScaling("llama3", 8.0, 128, 1.0, 4.0),
        ),
        ({"type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, 512)),
        (
            {
                "rope_type": "yarn",
                "factor": None,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.5,
                "beta_fast": 16,
                "truncate": False,
            },
            RopeScaling("yarn", 4.0, 128, attention_factor=1.5, beta_fast=16.0, truncate=False),
        ),
    ],
)
def test_rope_spellings(key: str, section: dict, scaling: RopeScaling, copy: Any) -> None:
    folder = copy("llama")
    edit(folder, rope_parameters=None)
    if key == "rope_scaling":
        edit(folder, rope_scaling=section, rope_theta=5000.0)
    else:
        edit(folder, rope_parameters={**section, "rope_theta": 5000.0})
    config = load(folder).config
    assert (config.rope_theta, config.rope_scaling) == (5000.0, scaling)


def test_generation_config(copy: Any) -> None:
    folder = copy("llama")
    edit(folder, "generation_config.json", eos_token_id=[7, 2, 9], temperature=0.6, top_k=20)
    checkpoint = load(edit(folder, eos_token_id=[2, 4]))
    assert checkpoint.config.eos_token_ids == (7, 2, 9, 4)
    assert checkpoint.sampling_defaults.values == {"temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").unlink()
    checkpoint = load(folder)
    assert checkpoint.config.eos_token_ids == (2, 4)
    assert checkpoint.sampling_defaults.values == {}


def test_broken_files_are_named(copy: Any) -> None:
    folder = copy("llama")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:-100], whole[:20], b"\xff" * 64, b""):
        weights.write_bytes(broken)
        assert "model.safetensors is corrupt or truncated" in refusal(folder)
    weights.unlink()
    assert "has neither model.safetensors nor" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "holds pytorch_model.bin" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "index.json lacks weight_map" in refusal(folder)
    (folder / "config.json").write_text("{nope")
    assert "config.json: not valid JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert "cannot read" in refusal(folder)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (math.nan, torch.float32),
        (math.inf, torch.bfloat16),
        (-math.inf, torch.float16),
        (1e30, torch.float16),
    ],
)
def test_weights_that_are_no_numbers_are_refused(
    value: float, dtype: torch.dtype, copy: Any
) -> None:
    """1e30 is none in float16."""
    folder, name = copy("llama"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][5, 7] = value
    save_file(tensors, folder / "model.safetensors")
    weights = load(folder, dtype).weights
    with pytest.raises(SurefootError) as caught:
        weights[name]
    named = f"{name} in {folder / 'model.safetensors'} holds NaN or infinite values as"
    assert caught.value.problem == f"{named} {str(dtype)[6:]}"
    assert len([weights[other] for other in weights if other != name]) == len(weights) - 1


@pytest.mark.parametrize(
    "name", ["q_proj.qweight", "q_proj.weight_scale", "q_proj.weight_scale_inv"]
)
def test_quantized_tensors_are_refused(name: str, copy: Any) -> None:
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.self_attn.{name}"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    assert f"quantized tensors (model.layers.0.self_attn.{name}" in refusal(folder)


def test_float8_tensors_are_refused(copy: Any) -> None:
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    assert "has type F8_E4M3, which is not supported" in refusal(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "no-such-name", "a/b/c", ""])
def test_unknown_models_are_refused(name: str) -> None:
    with pytest.raises(SurefootError, match=r"^model: there is no model .*smollm2-135m"):
        load_checkpoint(name, dtype=torch.float32)


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    for name in ("org/name", "org/name:file.gguf"):
        with pytest.raises(SurefootError, match=r"cannot be had .*\(no route\).*downloaded folder"):
            load_checkpoint(name, dtype=torch.float32)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(SurefootError, match=r"org/name:file.gguf"):
        load_checkpoint("org/name", dtype=torch.float32)


def test_one_file_of_a_folder_is_refused(base: dict[str, Path]) -> None:
    with pytest.raises(SurefootError, match="give its folder"):
        load(base["llama"] / "model.safetensors")


def test_inspection(base: dict[str, Path]) -> None:
    facts = inspect_model(str(base["qwen3"]))
    model = tiny_hf_module("qwen3")
    assert facts["parameters"] == sum(item.numel() for item in model.parameters())
    assert facts["tensor_types"] == {"F32": len(model.state_dict())}
    assert facts["eos_tokens"] == [{"id": 2, "text": "<|im_end|>"}]
    assert (facts["architecture"], facts["format"]) == ("qwen3", "safetensors")
    assert json.loads(json.dumps(facts)) == facts


def test_local_models(base: dict[str, Path], monkeypatch: Any, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(base["llama"], tmp_path / "models--org--some--name" / "snapshots" / "abc")
    (tmp_path / "models--org--other" / "snapshots" / "abc").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "empty"))
    listed = list_local_models()
    assert [(item["name"], item["local"]) for item in listed] == [
        ("smollm2-135m", False),
        ("org/some--name", True),
    ]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tiny_weights_fit(arch: str) -> None:
    config, weights = tiny_weights(arch, tied_embeddings=True, mlp_bias=arch == "llama")
    check_tensors(config, weights)
