"""Files of a model that are wrong, odd or hostile: one line by name, at once, never a traceback."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import EngineConfig
from surefoot.engine.pool_size import model_length
from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import check_tensors
from surefoot.models.loading.gguf_config import read_gguf_config
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_tokenizer import read_gguf_tokenizer
from surefoot.models.loading.hf_config import read_hf_config
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.sampling_defaults import read_gguf_sampling, read_hf_sampling
from surefoot.models.rope import rope_table
from tiny_models import tiny_config, tiny_gguf, tiny_tokenizer_json, tiny_weights, write_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "mscale": 0.7, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def read(folder: Path, **changes: Any) -> ModelConfig:
    """All that is read of a folder before its weights, ``changes`` in its config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    config = read_hf_config(folder)
    read_hf_sampling(folder)
    table = rope_table(config, 32)
    assert table.cos.isfinite().all() and table.sin.isfinite().all()
    return config


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(SurefootError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 288}, "eos_token_id = 288; expected token ids below the vocab_size of"),
        ({"eos_token_id": [2, 2**70]}, "expected token ids below the vocab_size of 288"),
        ({"bos_token_id": 10**6}, "bos_token_id = 1000000; expected token ids below"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648; expected a positive"),
        ({"num_hidden_layers": 10**30}, "expected a positive integer of at most 1000"),
        ({"max_position_embeddings": 10**18}, "a positive integer of at most 16777216"),
        ({"max_position_embeddings": 1e18}, "max_position_embeddings = 1e+18; expected a positive"),
        ({"vocab_size": 2**63}, "vocab_size = 9223372036854775808; expected"),
        ({"hidden_size": 10**400}, "hidden_size = 1000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0; expected a number from 1e-12 to 1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = NaN"),
        ({"head_dim": 15}, "head_dim = 15; expected an even number"),
        ({"head_dim": None, "num_attention_heads": 100}, "lacks head_dim"),
        ({"layer_types": 5}, "layer_types = 5; expected a list of names"),
        ({"layer_types": {"a": 1}}, "expected a list of names"),
        ({"rope_theta": 0}, "rope_theta = 0; expected a number from 2 to 1e+15"),
        ({"rope_theta": math.inf}, "rope_theta = Infinity; expected a number"),
        ({"rope_scaling": 5}, "rope_scaling = 5; expected an object"),
        ({"rope_scaling": YARN | {"rope_theta": 0}}, "rope_scaling.rope_theta = 0; expected"),
        ({"rope_scaling": YARN | {"rope_theta": 1}}, "rope_scaling.rope_theta = 1; expected"),
        ({"rope_scaling": YARN | {"factor": 1e-300}}, "rope_scaling.factor = 1e-300; expected"),
        ({"rope_scaling": YARN | {"beta_fast": 1e-300}}, "beta_fast = 1e-300; expected a number"),
        ({"rope_scaling": YARN | {"beta_slow": "1"}}, 'beta_slow = "1"; expected a number'),
        ({"rope_scaling": YARN | {"mscale_all_dim": -9.0}}, "mscale_all_dim = -9.0; expected"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor = 0; expected"),
        (
            {"rope_scaling": YARN | {"factor": None, "original_max_position_embeddings": 1 << 24}},
            "rope_scaling.factor = 3.",
        ),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "rope_scaling.factor = 0; expected"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "a number above low_freq_factor, 4"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0; expected a number"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "expected a string"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
    ],
)
def test_odd_configs(changes: dict, message: str, folder: Path) -> None:
    assert message in refusal(lambda: read(folder, **changes))


def test_files_nested_too_deeply(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "config.json: it is nested too deeply" in refusal(lambda: read_hf_config(folder))


NUMBERS = st.integers() | st.integers(-3, 300) | st.floats() | st.sampled_from([2**31, 10**18])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = [*CONFIG, "layer_types", "use_sliding_window", "sliding_window", "max_window_layers"]
KEYS += ["quantization_config", "partial_rotary_factor", "original_max_position_embeddings"]
ROPE_KEYS = ["rope_type", "type", "factor", "rope_theta", "beta_fast", "beta_slow", "mscale"]
ROPE_KEYS += ["mscale_all_dim", "attention_factor", "original_max_position_embeddings", "truncate"]
ROPE_KEYS += ["low_freq_factor", "high_freq_factor", "partial_rotary_factor"]


@settings(max_examples=200)
@given(data=st.data())
def test_any_value_of_any_key(data: st.DataObject, folder: Path) -> None:
    """A config of random values is read, with finite rotary tables, or refused by name."""
    keys = st.sampled_from(KEYS)
    changes = data.draw(st.dictionaries(keys, VALUES, max_size=2))
    if data.draw(st.booleans()):
        base = data.draw(st.sampled_from([YARN, LLAMA3, {"type": "linear", "factor": 2.0}]))
        rope = data.draw(st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES, max_size=2))
        changes["rope_scaling"] = base | rope
    try:
        config = read(folder, **changes)
    except SurefootError as error:
        assert "\n" not in str(error)
        return
    assert all(token < config.vocab_size for token in config.eos_token_ids)
    if config.layers > 2:
        with pytest.raises(SurefootError, match="does not fit its config"):
            check_tensors(config, {})


@settings(max_examples=100)
@given(data=st.data())
def test_any_value_of_other_files(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").unlink()
    files = {
        "tokenizer_config.json": ["added_tokens_decoder", "bos_token", "chat_template"],
        "special_tokens_map.json": ["eos_token", "additional_special_tokens"],
        "generation_config.json": ["temperature", "top_k", "do_sample", "eos_token_id", "top_p"],
    }
    name = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(st.dictionaries(st.sampled_from(files[name]), VALUES, max_size=2))
    (folder / name).write_text(json.dumps(content))
    try:
        read(folder)
        read_hf_tokenizer(folder).encode("the cat")
    except SurefootError as error:
        assert "\n" not in str(error)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"line\nbreak": {"content": "a"}},
        {"x": {"content": "a"}},
        {"-1": {"content": "a"}},
        {"²": {"content": "a"}},
        {"9" * 5000: {"content": "a"}},
        {"300": "a"},
        {"300": {}},
        {"300": {"content": 5}},
        {"300": {"content": "a", "special": "yes"}},
    ],
)
def test_odd_declared_tokens(entries: dict, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, added_tokens_decoder=entries)
    message = refusal(lambda: read_hf_tokenizer(folder))
    assert "tokenizer_config.json has added_tokens_decoder." in message
    assert "expected a token's id, and its content and flags" in message


def test_templates_that_are_no_text(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_bytes(b"\xff{{ x }}")
    assert "cannot read" in refusal(lambda: read_hf_tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    write_tokenizer(tmp_path, chat_template=[{"name": {}, "template": "x"}])
    (tmp_path / "chat_template.jinja").unlink()
    assert "expected a template or a list" in refusal(lambda: read_hf_tokenizer(tmp_path))


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


TEN = replaced({"String": "a"}, "a" * 10)
REPEATED = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3,
    "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [TEN, TEN]}, "at most 64 times as long"),
        ("normalizer", replaced({"Regex": "a+"}, "b" * 65), "at most 64 times as long"),
        ("normalizer", {"type": "Prepend", "prepend": "b" * 5000}, "4096 characters longer"),
        ("normalizer", replaced({"String": ""}, "b"), "expected a pattern that is not empty"),
        ("decoder", {"type": "Sequence", "decoders": [TEN, TEN]}, "at most 64 times as long"),
        ("post_processor", REPEATED, "post_processor.single"),
        ("normalizer", replaced({"Regex": "("}, "b"), "is no usable tokenizer"),
    ],
)
def test_tokenizers_that_grow_a_text(part: str, value: Any, message: str, tmp_path: Path) -> None:
    data = json.loads(tiny_tokenizer_json()) | {part: value}
    (write_tokenizer(tmp_path) / "tokenizer.json").write_text(json.dumps(data))
    assert message in refusal(lambda: read_hf_tokenizer(tmp_path))


def test_a_panic_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A regular expression that backtracks beyond its library's limit makes that panic, which is no
    Exception in Python."""
    data = json.loads(tiny_tokenizer_json())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = split | {"pattern": {"Regex": r"(a|aa)+(?=b)\1\1\1"}}
    (write_tokenizer(tmp_path) / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = read_hf_tokenizer(tmp_path)
    message = refusal(lambda: tokenizer.encode("a" * 40))
    assert message.startswith("prompt: the model's tokenizer failed on it: ")
    assert "retry-limit-in-match" in message
    assert tokenizer.encode("b") == tokenizer.encode("b")


def test_contexts_beyond_the_memory() -> None:
    model = tiny_config("llama", max_positions=1 << 24, head_dim=4096)
    message = refusal(lambda: model_length(EngineConfig(model="m"), model))
    assert "max_model_len: rotary tables of 16777216 positions take 825 GB here; set it" in message
    fitting = int(message.split("set it to ")[1].split()[0])
    assert model_length(EngineConfig(model="m", max_model_len=fitting), model) == fitting


@pytest.fixture(scope="module")
def small() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config, weights = tiny_weights("llama", vocab_size=288, layers=1)
    return replace(config, layers=1), weights


def read_gguf(path: Path) -> None:
    file = GgufFile(path)
    config = read_gguf_config(file)
    read_gguf_sampling(file)
    table = rope_table(config, 32)
    assert table.cos.isfinite().all() and table.sin.isfinite().all()
    read_gguf_tokenizer(file).encode("the cat")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": 2**31}, "llama.block_count of"),
        ({"llama.context_length": 2**31}, "a positive integer of at most 16777216"),
        ({"llama.rope.freq_base": 0.0}, "is 0.0, expected a number from 2 to 1e+15"),
        ({"llama.rope.freq_base": math.inf}, "is inf, expected a number from 2"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "is nan, expected a number"),
        ({"llama.rope.scaling.factor": 1e-30}, "is 1e-30, expected a number from 0.01"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_beta_slow": 0.0,
            },
            "yarn_beta_slow of",
        ),
        ({"llama.attention.key_length": 15}, "is 15, expected an even number"),
        ({"tokenizer.ggml.eos_token_id": 288}, "eos_token_id is 288, beyond its vocabulary of 288"),
        ({"tokenizer.ggml.bos_token_id": 2**31}, "bos_token_id is 2147483648, beyond"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is [1, 2], expected a list of str"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "it has 288 tokens and 2 tokenizer.ggml.token_"),
        ({"tokenizer.ggml.token_type": "x"}, "token_type is 'x', expected a list"),
        ({"tokenizer.ggml.merges": [1]}, "merges is [1], expected a list of str"),
        ({"tokenizer.ggml.merges": ["a"]}, "do not fit its vocabulary"),
        ({"tokenizer.ggml.pre": [1]}, "pre-tokenizer '[1]', which is not supported"),
        ({"tokenizer.ggml.model": [1]}, "of model [1], which is not supported"),
        ({"split.count": "x"}, "one part of a split GGUF file"),
        ({"general.alignment": "x"}, "general.alignment is x"),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores of its vocabulary's"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": [0.5] * 288,
                "tokenizer.ggml.unknown_token_id": 288,
            },
            "unknown_token_id is 288, no token of it",
        ),
    ],
)
def test_odd_gguf_metadata(metadata: dict, message: str, small: Any, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", *small, metadata=metadata)
    assert message in refusal(lambda: read_gguf(path))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_odd_frequency_factors(value: float, small: Any, tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": [1.0] * 7 + [value]}
    path = tiny_gguf(tmp_path / "model.gguf", *small, tensors=factors)
    assert "rope_freqs.weight holds" in refusal(lambda: read_gguf(path))


@settings(max_examples=150)
@given(at=st.integers(0, 1 << 20), bits=st.integers(1, 255))
def test_any_byte_of_a_gguf_header(at: int, bits: int, small: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "header.gguf"
    if not path.exists():
        tiny_gguf(path, *small)
    content = bytearray(path.read_bytes())
    content[at % GgufFile(path).data_start] ^= bits
    changed = path.with_name("changed.gguf")
    changed.write_bytes(content)
    try:
        read_gguf(changed)
    except SurefootError as error:
        assert len(str(error)) < 2000
