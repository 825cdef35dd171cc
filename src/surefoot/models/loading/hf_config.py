"""config.json and the special tokens of generation_config.json -> ``ModelConfig``.

Both spellings of the rotary settings are read: ``rope_theta`` with ``rope_scaling`` (``type`` or
``rope_type``), and ``rope_parameters`` of transformers 5. Whatever would change the model's
results and is not implemented is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.models.architecture import Architecture, Presence
from surefoot.models.config import (
    MOST_LAYERS,
    NORM_EPSILON,
    ROPE_NUMBERS,
    ROPE_THETA,
    ModelConfig,
    RopeScaling,
)
from surefoot.models.loading.json_reader import JsonReader
from surefoot.models.registry import by_hf_name

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# What transformers assumes for a config without rope_theta.
DEFAULT_THETA = 10000.0
FULL, SLIDING = "full_attention", "sliding_attention"


def read_hf_config(folder: Path) -> ModelConfig:
    """The config of a model folder. Raises SurefootError, naming key and file, for what is
    missing, mistyped or unsupported."""
    reader = JsonReader.open(folder / "config.json")
    architectures = reader.data.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        reader.require("architectures")
        raise reader.wrong("architectures", architectures, "a list of architecture names")
    config = read_decoder_config(reader, by_hf_name(str(architectures[0])))
    eos, bos = _stop_tokens(reader, folder, config.vocab_size)
    return replace(config, bos_token_id=bos, eos_token_ids=eos)


def read_decoder_config(
    reader: JsonReader, architecture: Architecture, windows: bool = False
) -> ModelConfig:
    """Sizes and constants of decoder layers, without special tokens; errors as above.
    ``windows``: the caller reads the layers' types by itself (see ``layer_types``)."""
    reader.require(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    _refuse_unsupported(reader)
    if not windows:
        _refuse_windows(reader, architecture)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.wrong("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    head_dim = reader.integer("head_dim", architecture.default_head_dim or hidden // heads or None)
    if head_dim % 2:
        raise reader.wrong("head_dim", head_dim, "an even number")
    theta, scaling = _read_rope(reader)
    attention_bias = reader.boolean("attention_bias", False)
    mlp_bias = reader.boolean("mlp_bias", False)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        layers=reader.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=reader.integer("max_position_embeddings"),
        norm_eps=reader.number("rms_norm_eps", within=NORM_EPSILON),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=reader.boolean("tie_word_embeddings", False),
        attention_bias=settle(architecture.qkv_bias, attention_bias),
        output_bias=settle(architecture.output_bias, attention_bias),
        mlp_bias=settle(architecture.mlp_bias, mlp_bias),
        qk_norm=architecture.qk_norm,
    )


def settle(presence: Presence, in_checkpoint: bool) -> bool:
    """A flag of ``ModelConfig`` from what the architecture and the checkpoint say."""
    return in_checkpoint if presence is Presence.CONFIG else presence is Presence.ALWAYS


def _refuse_unsupported(reader: JsonReader) -> None:
    quantization = reader.section("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "unnamed")
        raise SurefootError(
            "model",
            f"{reader.path} asks for {method!r} quantization, which is not supported",
            "use the unquantized checkpoint, or a GGUF file in Q4_0, Q4_1, Q8_0 or a K-quant",
        )
    activation = reader.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise SurefootError(
            "model", f"{reader.path} has hidden_act {activation!r}", "only silu is supported"
        )


def layer_types(reader: JsonReader, slide_by_count: bool) -> list[str]:
    """The type of each layer, by transformers' rule where the file has none: all attend to
    everything but, with ``slide_by_count``, those from ``max_window_layers`` on where a window is
    set and ``use_sliding_window`` is true."""
    layers = reader.integer("num_hidden_layers", most=MOST_LAYERS)
    found = reader.data.get("layer_types")
    if found is not None:
        if not isinstance(found, list):
            raise reader.wrong("layer_types", found, "a list of names")
        if len(found) < layers:
            raise reader.wrong("layer_types", found, f"one name for each of {layers} layers")
        return [str(kind) for kind in found[:layers]]
    on = reader.boolean("use_sliding_window", False) and reader.data.get("sliding_window")
    first = int(reader.number("max_window_layers", 28)) if on and slide_by_count else layers
    return [FULL if index < first else SLIDING for index in range(layers)]


def _refuse_windows(reader: JsonReader, architecture: Architecture) -> None:
    other = sorted(set(layer_types(reader, architecture.has_sliding_window)) - {FULL})
    if other:
        raise SurefootError(
            "model",
            f"{reader.path} uses {', '.join(other)} layers",
            "only full attention is supported, as with use_sliding_window false",
        )


def _read_rope(reader: JsonReader) -> tuple[float, RopeScaling]:
    max_positions = reader.integer("max_position_embeddings")
    rope = reader.section("rope_scaling") or reader.section("rope_parameters")
    rope = rope or JsonReader(reader.path, {}, "rope_parameters.")
    nested = [key for key, value in rope.data.items() if isinstance(value, dict)]
    if nested:
        raise SurefootError(
            "model",
            f"{reader.path} sets RoPE per layer type ({', '.join(nested)})",
            "only one setting for all layers is supported",
        )
    theta = reader.number("rope_theta", DEFAULT_THETA, ROPE_THETA)
    theta = rope.number("rope_theta", theta, ROPE_THETA)
    partial = reader.number("partial_rotary_factor", 1.0)
    if rope.number("partial_rotary_factor", partial) != 1:
        raise SurefootError(
            "model", f"{reader.path} has a partial_rotary_factor", "only full RoPE is supported"
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise SurefootError(
            "model",
            f"{reader.path} asks for {kind!r} RoPE scaling, which is not supported",
            "supported: " + ", ".join(ROPE_KINDS),
        )
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind, factor=rope.number("factor", within=ROPE_NUMBERS))
    # transformers gives a top-level value precedence over one in the section.
    original = rope.integer("original_max_position_embeddings", max_positions)
    original = reader.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        rope.require("factor", "low_freq_factor", "high_freq_factor")
        low = rope.number("low_freq_factor", within=ROPE_NUMBERS)
        high = rope.number("high_freq_factor", within=ROPE_NUMBERS)
        if high <= low:
            raise rope.wrong("high_freq_factor", high, f"a number above low_freq_factor, {low:g}")
        return theta, RopeScaling(
            kind,
            factor=rope.number("factor", within=ROPE_NUMBERS),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    attention = rope.data.get("attention_factor")
    if "factor" not in rope.data:
        rope.require("factor")

    def optional(key: str, default: float) -> float:
        """In transformers 0 means the default, too."""
        return rope.number(key, within=ROPE_NUMBERS) if rope.data.get(key) else default

    return theta, RopeScaling(
        kind,
        # A factor of null means the ratio of the two lengths (transformers).
        factor=rope.number("factor", max_positions / original, ROPE_NUMBERS),
        original_max_positions=original,
        attention_factor=(
            None if attention is None else rope.number("attention_factor", within=ROPE_NUMBERS)
        ),
        beta_fast=optional("beta_fast", 32.0),
        beta_slow=optional("beta_slow", 1.0),
        mscale=optional("mscale", 0.0),
        mscale_all_dim=optional("mscale_all_dim", 0.0),
        truncate=rope.boolean("truncate", True),
    )


def _stop_tokens(
    reader: JsonReader, folder: Path, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """(end-of-text ids of generation_config.json, then config.json's; first-token id)."""
    readers = [reader]
    if (folder / "generation_config.json").is_file():
        readers.insert(0, JsonReader.open(folder / "generation_config.json"))

    def ids(key: str) -> tuple[int, ...]:
        found = (token for item in readers for token in item.token_ids(key, vocab_size))
        return tuple(dict.fromkeys(found))

    return ids("eos_token_id"), next(iter(ids("bos_token_id")), None)
