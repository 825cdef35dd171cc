"""config.json of the DFlash family in the layouts found in the wild.

z-lab and SpecForge nest what is the drafter's own in ``dflash_config`` (or ``dspark_config``),
DeepSeek writes it flat, speculators nests the layers' shape instead. What two places say twice must
agree. Whatever would change the drafter's results and is not known here is refused by name.
"""

from __future__ import annotations

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
from surefoot.speculation.proposers.dflash.keys import (
    BUNDLE,
    DFLASH2,
    ENTRIES,
    NESTED,
    NESTED_KEYS,
    OWN_KEYS,
    SECTIONS,
    TAPS,
    TELLING,
    TOP_KEYS,
    Places,
    refuse_other_networks,
    refuse_unknown,
)

KINDS = ("dflash", "dspark", "dflash2")
USUAL_BLOCK = 16


def is_dflash(folder: Path) -> bool:
    """Whether the folder holds a drafter of this family, as far as its config.json tells."""
    if not (folder / "config.json").is_file():
        return False
    data = JsonReader.open(folder / "config.json").data
    if NESTED in data:
        return data[NESTED] in KINDS
    return any(data.get(key) for key in (*SECTIONS, TAPS, *BUNDLE))


def read_config(folder: Path) -> DFlashConfig:
    """Read the folder's config.json. Raises SurefootError, naming key and file, for what is
    missing, mistyped, contradictory or unknown."""
    reader = JsonReader.open(folder / "config.json")
    if NESTED in reader.data:
        return _checked(reader, _read_nested(reader))
    return _checked(reader, _read_flat(reader))


def _read_flat(reader: JsonReader) -> DFlashConfig:
    for key in BUNDLE:
        if key in reader.data:
            raise SurefootError(
                "model",
                f"{reader.path} sets {key}",
                "drafters that are part of a DeepSeek-V4 checkpoint are not supported",
            )
    refuse_unknown(reader, TOP_KEYS, TELLING)
    refuse_other_networks(reader)
    sections = [found for name in SECTIONS if (found := reader.section(name)) is not None]
    for section in sections:
        refuse_unknown(section, OWN_KEYS)
    places = Places([*sections, reader])
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
    ids = _layer_ids(places.of(TAPS), TAPS, least=-1)
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
    refuse_unknown(reader, NESTED_KEYS)
    inner = reader.section("transformer_layer_config")
    if inner is None:
        raise SurefootError("model", f"{reader.path} lacks transformer_layer_config")
    refuse_other_networks(inner)
    layer = read_decoder_config(inner, QWEN3, windows=True)
    places, dspark = Places([reader]), kind == "dspark"
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
        layer_ids=_layer_ids(reader, ENTRIES, least=0),
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


def _markov(places: Places, default: int) -> MarkovShape | None:
    rank = places.count("markov_rank", default)
    kind = places.text("markov_head_type", "vanilla")
    if rank and kind not in MARKOV_KINDS:
        raise places.of("markov_head_type").wrong(
            "markov_head_type", kind, "one of " + ", ".join(MARKOV_KINDS)
        )
    return MarkovShape(kind, rank) if rank else None


def _dflash2(places: Places) -> dict[str, Any]:
    found = [key for key in DFLASH2 if places.get(key) is not None]
    if not found:
        return {}
    taps, group, rank, top_k = (places.integer(key) for key in DFLASH2)
    return {"convolutions": Convolutions(taps, group), "selector": Selector(rank, top_k)}


def _mask_token(places: Places) -> int:
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


def _visibilities(reader: JsonReader, places: Places, always_both: bool) -> tuple[Visibility, ...]:
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


def _checked(reader: JsonReader, config: DFlashConfig) -> DFlashConfig:
    layer, vocab = config.layer, config.layer.vocab_size

    def refuse(problem: str, fix: str = "") -> SurefootError:
        return SurefootError("model", f"{reader.path} {problem}", fix)

    if not 2 <= config.block_size <= MOST_BLOCK_ROWS:
        raise refuse(f"has a block_size of {config.block_size}", f"known: 2 to {MOST_BLOCK_ROWS}")
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
