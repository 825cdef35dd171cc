"""config.json of the DFlash family in the layouts found in the wild.

z-lab and SpecForge nest what is the drafter's own in ``dflash_config`` (or ``dspark_config``),
DeepSeek writes it flat, speculators nests the layers' shape instead. What two places say twice must
agree. Whatever would change the drafter's results and is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.hf_config import SLIDING, layer_types, read_decoder_config
from surefoot.models.loading.json_reader import JsonReader
from surefoot.models.qwen3 import QWEN3
from surefoot.speculation.proposers.dflash.config import (
    MARKOV_KINDS,
    MOST_BLOCK_ROWS,
    Convolutions,
    DFlashConfig,
    MarkovShape,
    Selector,
    Visibility,
)

NESTED = "speculators_model_type"
KINDS = ("dflash", "dspark", "dflash2")
SECTIONS = ("dflash_config", "dspark_config")
USUAL_BLOCK = 16
_TAPS, _ENTRIES = "target_layer_ids", "aux_hidden_state_layer_ids"
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OWN_KEYS = {
    *_DFLASH2,
    _TAPS,
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
_TOP_KEYS = {*_OWN_KEYS, *SECTIONS, "rms_norm_eps", "draft_vocab_size", "is_neox_style"}
_TOP_KEYS |= {"rope_is_neox_style"}
_NESTED_KEYS = {
    *_OWN_KEYS,
    NESTED,
    _ENTRIES,
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
_TELLING = ("norm", "draft", "scale", "softcap", "aux", "mask", "target", "markov", "confidence")
_TELLING += ("selector", "conv_", "block", "anchor", "causal", "sink", "projector", "dspark")
_TELLING += ("dflash", "neox", "swa")
_BUNDLE = ("dspark_block_size", "dspark_target_layer_ids", "dspark_markov_rank")


def is_dflash(folder: Path) -> bool:
    """Whether the folder holds a drafter of this family, as far as its config.json tells."""
    if not (folder / "config.json").is_file():
        return False
    data = JsonReader.open(folder / "config.json").data
    if NESTED in data:
        return data[NESTED] in KINDS
    return any(data.get(key) for key in (*SECTIONS, _TAPS, *_BUNDLE))


def read_config(folder: Path) -> DFlashConfig:
    """Read the folder's config.json. Raises SurefootError, naming key and file, for what is
    missing, mistyped, contradictory or unknown."""
    reader = JsonReader.open(folder / "config.json")
    if NESTED in reader.data:
        return _checked(reader, _read_nested(reader))
    return _checked(reader, _read_flat(reader))


class _Places:
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


def _read_flat(reader: JsonReader) -> DFlashConfig:
    for key in _BUNDLE:
        if key in reader.data:
            raise SurefootError(
                "model",
                f"{reader.path} sets {key}",
                "drafters that are part of a DeepSeek-V4 checkpoint are not supported",
            )
    _refuse_unknown(reader, _TOP_KEYS, _TELLING)
    _refuse_other_networks(reader)
    sections = [found for name in SECTIONS if (found := reader.section(name)) is not None]
    for section in sections:
        _refuse_unknown(section, _OWN_KEYS)
    places = _Places([*sections, reader])
    projects, projector = places.get("projector_type"), places.text("projector_type", "dflash")
    if projector not in ("dflash", "dspark", "dflash2"):
        raise SurefootError(
            "model", f"{reader.path} has a {projector!r} projector, which is not supported"
        )
    markov = _markov(places, 0)
    names = reader.data.get("architectures")
    named = isinstance(names, list) and any(str(name).endswith("DSparkModel") for name in names)
    dspark = projector == "dspark" or markov is not None or named or not sections
    layer = read_decoder_config(reader, QWEN3, windows=True)
    layout = "deepseek" if not sections else "specforge" if projects else "z-lab"
    alpha = places.number("confidence_head_alpha", 0.0)
    ids = _layer_ids(places.of(_TAPS), _TAPS, least=-1)
    return DFlashConfig(
        layout=layout,
        layer=layer,
        draft_vocab_size=reader.integer("draft_vocab_size", layer.vocab_size),
        target_hidden_size=places.integer("target_hidden_size", layer.hidden_size),
        block_size=places.integer("block_size", USUAL_BLOCK),
        layer_ids=None if ids is None else tuple(index + 1 for index in ids),
        mask_token_id=_mask_token(places),
        anchor_predicts=places.boolean("sample_from_anchor", dspark),
        layers=_visibilities(reader, places, always_both=layout == "deepseek"),
        markov=markov,
        confidence=places.boolean("enable_confidence_head", alpha > 0),
        confidence_with_markov=places.boolean("confidence_head_with_markov", False),
        **_dflash2(places),
        embedding_scale=places.number("input_embedding_scale", 1.0),
        logit_scale=places.number("output_multiplier", 1.0),
        logit_cap=places.number("final_logit_softcapping", 0.0),
    )


def _read_nested(reader: JsonReader) -> DFlashConfig:
    kind = reader.text(NESTED)
    if kind not in KINDS:
        raise SurefootError("model", f"{reader.path} holds a {kind!r} drafter, not of this family")
    _refuse_unknown(reader, _NESTED_KEYS)
    inner = reader.section("transformer_layer_config")
    if inner is None:
        raise SurefootError("model", f"{reader.path} lacks transformer_layer_config")
    _refuse_other_networks(inner)
    layer = read_decoder_config(inner, QWEN3, windows=True)
    places, dspark = _Places([reader]), kind == "dspark"
    told = reader.section("speculators_config")
    verifier = told.section("verifier") if told is not None else None
    both = reader.boolean("sliding_window_non_causal", kind == "dflash2")
    window = _window(inner)
    return DFlashConfig(
        layout="speculators",
        layer=layer,
        draft_vocab_size=reader.integer("draft_vocab_size", layer.vocab_size),
        target_hidden_size=reader.integer("target_hidden_size", layer.hidden_size),
        block_size=reader.integer("block_size", 8),
        layer_ids=_layer_ids(reader, _ENTRIES, least=0),
        mask_token_id=_mask_token(places),
        # Files that their class writes always have the key; others are served without.
        anchor_predicts=reader.boolean("sample_from_anchor", False),
        layers=tuple(
            Visibility(not both, window, from_anchor=window > 0)
            if each == SLIDING
            else Visibility(False)
            for each in _layer_types(inner)
        ),
        markov=_markov(places, 256 if dspark else 0),
        confidence=reader.boolean("enable_confidence_head", dspark),
        confidence_with_markov=reader.boolean("confidence_head_with_markov", dspark),
        **_dflash2(places),
        verifier=(verifier.data.get("name_or_path") or None) if verifier else None,
    )


def _markov(places: _Places, default: int) -> MarkovShape | None:
    rank = places.count("markov_rank", default)
    kind = places.text("markov_head_type", "vanilla")
    if rank and kind not in MARKOV_KINDS:
        raise places.of("markov_head_type").wrong(
            "markov_head_type", kind, "one of " + ", ".join(MARKOV_KINDS)
        )
    return MarkovShape(kind, rank) if rank else None


def _dflash2(places: _Places) -> dict[str, Any]:
    found = [key for key in _DFLASH2 if places.get(key) is not None]
    if not found:
        return {}
    taps, group, rank, top_k = (places.integer(key) for key in _DFLASH2)
    return {"convolutions": Convolutions(taps, group), "selector": Selector(rank, top_k)}


def _mask_token(places: _Places) -> int:
    token = places.get("mask_token_id")
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        reader = places.of("mask_token_id")
        if token is None:
            reader.require("mask_token_id")
        raise reader.wrong("mask_token_id", token, "a token id")
    return token


def _layer_ids(reader: JsonReader, key: str, least: int) -> tuple[int, ...] | None:
    ids = reader.data.get(key)
    if not ids:
        return None
    good = isinstance(ids, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= least for item in ids
    )
    if not good or sorted(set(ids)) != ids:
        raise reader.wrong(key, ids, "ascending layer indices")
    return tuple(ids)


def _layer_types(reader: JsonReader) -> list[str]:
    types = layer_types(reader, slide_by_count=True)
    other = sorted(set(types) - {SLIDING, "full_attention"})
    if other:
        raise SurefootError("model", f"{reader.path} uses {', '.join(other)} layers")
    return types


def _window(reader: JsonReader) -> int:
    """The window of sliding layers, 0 for none: transformers drops it where ``use_sliding_window``
    is not true."""
    if not reader.boolean("use_sliding_window", False) or not reader.data.get("sliding_window"):
        return 0
    return reader.integer("sliding_window")


def _visibilities(
    reader: JsonReader, places: _Places, always_both: bool
) -> tuple[Visibility, ...]:
    types = _layer_types(reader)
    if places.boolean("use_swa", False) and SLIDING not in types:
        types = [SLIDING] * len(types)
    window = places.count("swa_window_size", _window(reader))
    causal = places.get("is_causal")
    if causal is None:
        causal = places.get("causal")
    if causal is not None and not isinstance(causal, bool):
        raise places.of("is_causal").wrong("is_causal", causal, "true or false")
    if always_both and (causal or SLIDING in types):
        raise SurefootError(
            "model", f"{reader.path} has causal or sliding layers", "not known in this layout"
        )
    return tuple(
        Visibility(each == SLIDING if causal is None else causal, window if each == SLIDING else 0)
        for each in types
    )


def _refuse_unknown(
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


def _refuse_other_networks(reader: JsonReader) -> None:
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


def _checked(reader: JsonReader, config: DFlashConfig) -> DFlashConfig:
    layer, vocab = config.layer, config.layer.vocab_size

    def refuse(problem: str, fix: str = "") -> SurefootError:
        return SurefootError("model", f"{reader.path} {problem}", fix)

    if not 2 <= config.block_size <= MOST_BLOCK_ROWS:
        raise refuse(f"has a block_size of {config.block_size}", f"2 to {MOST_BLOCK_ROWS} are known")
    if config.mask_token_id >= vocab:
        raise refuse(f"has mask_token_id {config.mask_token_id} in a vocabulary of {vocab}")
    if config.draft_vocab_size > vocab:
        raise refuse(f"has draft_vocab_size {config.draft_vocab_size} above vocab_size {vocab}")
    if config.confidence and config.confidence_with_markov and config.markov is None:
        raise refuse("has a confidence head that reads a Markov head, and no Markov head")
    if config.selector is not None:
        if config.markov is not None or config.confidence or config.anchor_predicts:
            raise refuse("mixes DFlash 2 with another family's heads")
        if config.draft_vocab_size < vocab:
            raise refuse("has a path selector over a draft vocabulary")
        if config.selector.top_k > vocab:
            raise refuse(f"selects from {config.selector.top_k} of {vocab} tokens")
        assert config.convolutions is not None
        if layer.hidden_size % config.convolutions.group:
            raise refuse(f"has conv_group_size {config.convolutions.group} for {layer.hidden_size}")
    return replace(config, layer=replace(layer, tied_embeddings=False))
