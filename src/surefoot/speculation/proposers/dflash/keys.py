"""Keys of the DFlash family's configs: which are known, and where they may stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.json_reader import JsonReader

NESTED = "speculators_model_type"
SECTIONS = ("dflash_config", "dspark_config")
TAPS, ENTRIES = "target_layer_ids", "aux_hidden_state_layer_ids"
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OWN_KEYS = {
    *DFLASH2,
    TAPS,
    "block_size",
    "mask_token_id",
    "target_hidden_size",
    "projector_type",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
    "sample_from_anchor",
    "causal",
    "is_causal",
    "use_swa",
    "swa_window_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    # Of training alone.
    "attention_mode",
    "num_anchors",
    "num_target_layers",
    "num_speculative_tokens",
}
TOP_KEYS = {*OWN_KEYS, *SECTIONS, "rms_norm_eps", "draft_vocab_size", "is_neox_style"}
TOP_KEYS |= {"rope_is_neox_style"}
NESTED_KEYS = {
    *OWN_KEYS,
    NESTED,
    ENTRIES,
    "speculators_version",
    "speculators_config",
    "sliding_window_non_causal",
    "transformer_layer_config",
    "draft_vocab_size",
    "architectures",
    "model_type",
    "auto_map",
    "dtype",
    "torch_dtype",
    "embed_requires_grad",
    "tie_word_embeddings",
    "transformers_version",
}
# Flat configs carry whatever their base class saves; names like these would be part of the network.
TELLING = ("norm", "draft", "scale", "softcap", "aux", "mask", "target", "markov", "confidence")
TELLING += ("selector", "conv_", "block", "anchor", "causal", "sink", "projector", "dspark")
TELLING += ("dflash", "neox", "swa")
BUNDLE = ("dspark_block_size", "dspark_target_layer_ids", "dspark_markov_rank")


class Places:
    """Keys that may stand in a section or at top level: the first place counts, and no other may
    contradict it."""

    def __init__(self, readers: Sequence[JsonReader]) -> None:
        self.readers = readers

    def of(self, key: str) -> JsonReader:
        """The reader that has the key; the top level's if none has."""
        found = [reader for reader in self.readers if reader.data.get(key) is not None]
        if any(reader.data[key] != found[0].data[key] for reader in found):
            values = ", ".join(f"{item.prefix}{key} = {item.data[key]!r}" for item in found)
            raise SurefootError("model", f"{found[0].path} contradicts itself: {values}")
        return found[0] if found else self.readers[-1]

    def get(self, key: str) -> Any:
        return self.of(key).data.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        return self.of(key).integer(key, default)

    def count(self, key: str, default: int) -> int:
        """As ``integer``, or 0."""
        given = self.get(key)
        if given is None:
            return default
        return 0 if given == 0 and not isinstance(given, bool) else self.integer(key)

    def number(self, key: str, default: float) -> float:
        return self.of(key).number(key, default)

    def boolean(self, key: str, default: bool) -> bool:
        return self.of(key).boolean(key, default)

    def text(self, key: str, default: str) -> str:
        return self.of(key).text(key, default)


def refuse_unknown(
    reader: JsonReader, known: set[str], telling: Sequence[str] | None = None
) -> None:
    """``telling``: only keys with one of these parts can matter."""
    for key, value in reader.data.items():
        if not value or key in known:
            continue
        if telling is None or any(part in key for part in telling):
            raise SurefootError(
                "model",
                f"{reader.path} sets {reader.prefix}{key}, which is not known",
                "drafters that need it would draft wrongly",
            )


def refuse_other_networks(reader: JsonReader) -> None:
    kind = reader.text("model_type", "qwen3")
    if kind != "qwen3":
        raise SurefootError(
            "model", f"{reader.path} has layers of model_type {kind!r}", "only qwen3 is supported"
        )
    for key in ("is_neox_style", "rope_is_neox_style"):
        if not reader.boolean(key, True):
            raise SurefootError(
                "model", f"{reader.path} has {key} false", "only half-split RoPE is supported"
            )
