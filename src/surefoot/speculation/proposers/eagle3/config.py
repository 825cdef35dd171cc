"""config.json of an EAGLE-3 checkpoint, flat (SafeAILab, SpecForge) or nested (speculators).

The two families share one network and name its details differently. Whatever would change the
drafter's results and is not known here is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.llama import LLAMA
from surefoot.models.loading.hf_config import read_decoder_config
from surefoot.models.loading.json_reader import JsonReader

NESTED = "speculators_model_type"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_FLAT_KEYS = {
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
    "num_aux_hidden_states",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "logit_scale",
    "rms_norm_eps",
    _LAYERS,
}
_SECTION_KEYS = {"use_aux_hidden_state", "norm_before_fc", _LAYERS}
_NESTED_KEYS = {
    NESTED,
    "speculators_version",
    "architectures",
    "model_type",
    "transformer_layer_config",
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
    "embed_requires_grad",
    "speculators_config",
    "tie_word_embeddings",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "auto_map",
    _LAYERS,
}
# Flat configs carry whatever their base class saves; names like these would be part of the network.
_TELLING = ("eagle", "norm", "fc", "draft", "residual", "scale", "softcap", "aux", "mask", "target")


@dataclass(frozen=True)
class Eagle3Config:
    """``layer``: sizes and constants of the drafter's layer; its ``vocab_size`` is the target's,
    and ``qk_norm`` is settled by the tensors."""

    layout: str
    """``flat`` or ``speculators``."""
    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    captured: int
    """Layers captured from the target."""
    layer_ids: tuple[int, ...] | None
    """As the file says; None where it says nothing."""
    ids_are_outputs: bool
    """The ids count layer outputs (SGLang, SpecForge), not layers entered (vLLM, speculators)."""
    norm_before_residual: bool
    """The residual starts from the normed hidden state."""
    norm_before_fc: bool
    """One norm over all captured layers side by side."""
    fc_norm: bool
    """One norm for each captured layer."""
    norm_before_head: bool
    norm_fed_back: bool
    """The next step starts from the normed hidden state."""
    logit_scale: float
    verifier: str | None
    """The target it was made for, where the file says so."""

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The captured layers of a target with so many, as the index of the layer that each
        residual stream *enters* (0: the embeddings), ascending.

        A file without ids means the default. Ids that are the default in one of the two ways of
        counting are taken that way, whoever wrote the file.
        """
        default = (2, target_layers // 2, target_layers - 3)
        if self.layer_ids is None or self.layer_ids == default:
            return default
        raised = tuple(index + 1 for index in self.layer_ids)
        return raised if self.ids_are_outputs or raised == default else self.layer_ids


def is_eagle3(folder: Path) -> bool:
    """Whether the folder holds an EAGLE-3 drafter, as far as its config.json tells."""
    if not (folder / "config.json").is_file():
        return False
    data = JsonReader.open(folder / "config.json").data
    if NESTED in data:
        return data[NESTED] == "eagle3"
    names = data.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or "draft_vocab_size" in data


def read_config(folder: Path) -> Eagle3Config:
    """Read the folder's config.json. Raises SurefootError, naming key and file, for what is
    missing, mistyped, contradictory or unknown."""
    reader = JsonReader.open(folder / "config.json")
    if NESTED in reader.data:
        return _read_nested(reader)
    return _read_flat(reader)


def _read_flat(reader: JsonReader) -> Eagle3Config:
    for key, value in reader.data.items():
        if value and key not in _FLAT_KEYS and any(part in key for part in _TELLING):
            raise _unknown(reader, key)
    layer = read_decoder_config(reader, LLAMA)
    section = reader.section("eagle_config") or JsonReader(reader.path, {}, "eagle_config.")
    for key, value in section.data.items():
        if value and key not in _SECTION_KEYS:
            raise _unknown(section, key)
    if not section.boolean("use_aux_hidden_state", True):
        raise SurefootError(
            "model", f"{reader.path} captures no layers (use_aux_hidden_state false)"
        )
    ids = _layer_ids(section) or _layer_ids(reader)
    norms_head = reader.boolean("norm_output", True)
    return _checked(
        reader,
        Eagle3Config(
            layout="flat",
            layer=layer,
            draft_vocab_size=reader.integer("draft_vocab_size", layer.vocab_size),
            target_hidden_size=reader.integer("target_hidden_size", layer.hidden_size),
            captured=reader.integer("num_aux_hidden_states", len(ids or (0, 0, 0))),
            layer_ids=ids,
            ids_are_outputs=_layer_ids(section) is not None,
            norm_before_residual=reader.boolean("norm_before_residual", False),
            norm_before_fc=section.boolean(
                "norm_before_fc", reader.boolean("norm_before_fc", False)
            ),
            fc_norm=reader.boolean("fc_norm", False),
            norm_before_head=norms_head,
            norm_fed_back=False,
            logit_scale=reader.number("logit_scale", 1.0),
            verifier=None,
        ),
    )


def _read_nested(reader: JsonReader) -> Eagle3Config:
    kind = reader.text(NESTED)
    if kind != "eagle3":
        raise SurefootError("model", f"{reader.path} holds a {kind!r} drafter, not EAGLE-3")
    for key, value in reader.data.items():
        if value and key not in _NESTED_KEYS:
            raise _unknown(reader, key)
    inner = reader.section("transformer_layer_config")
    if inner is None:
        raise SurefootError("model", f"{reader.path} lacks transformer_layer_config")
    layer = read_decoder_config(inner, LLAMA)
    ids = _layer_ids(reader)
    told = reader.section("speculators_config")
    verifier = told.section("verifier") if told is not None else None
    return _checked(
        reader,
        Eagle3Config(
            layout="speculators",
            layer=layer,
            draft_vocab_size=reader.integer("draft_vocab_size", layer.vocab_size),
            target_hidden_size=reader.integer("target_hidden_size", layer.hidden_size),
            captured=len(ids or (0, 0, 0)),
            layer_ids=ids,
            ids_are_outputs=False,
            # The class's own defaults, for files written before a key existed.
            norm_before_residual=reader.boolean("norm_before_residual", False),
            norm_before_fc=reader.boolean("norm_before_fc", False),
            fc_norm=reader.boolean("fc_norm", False),
            norm_before_head=True,
            norm_fed_back=reader.boolean("norm_output", False),
            logit_scale=1.0,
            verifier=(verifier.data.get("name_or_path") or None) if verifier else None,
        ),
    )


def _checked(reader: JsonReader, config: Eagle3Config) -> Eagle3Config:
    if config.layer.layers != 1:
        raise SurefootError(
            "model", f"{reader.path} has {config.layer.layers} layers", "drafters of one are known"
        )
    if config.fc_norm and config.norm_before_fc:
        raise SurefootError("model", f"{reader.path} sets both fc_norm and norm_before_fc")
    if config.draft_vocab_size > config.layer.vocab_size:
        raise SurefootError(
            "model",
            f"{reader.path} has draft_vocab_size {config.draft_vocab_size} above vocab_size "
            f"{config.layer.vocab_size}",
        )
    if config.layer_ids is not None and config.captured != len(config.layer_ids):
        raise reader.wrong("num_aux_hidden_states", config.captured, "as many as layer ids")
    return replace(config, layer=replace(config.layer, tied_embeddings=False))


def _layer_ids(reader: JsonReader) -> tuple[int, ...] | None:
    ids = reader.data.get(_LAYERS)
    if not ids:
        return None
    good = isinstance(ids, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids
    )
    if not good or sorted(set(ids)) != ids:
        raise reader.wrong(_LAYERS, ids, "ascending layer indices")
    return tuple(ids)


def _unknown(reader: JsonReader, key: str) -> SurefootError:
    return SurefootError(
        "model",
        f"{reader.path} sets {reader.prefix}{key}, which is not known",
        "drafters that need it would draft wrongly",
    )
