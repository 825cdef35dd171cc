"""Drafters of the DFlash family as GGUF files: the same as the folders that they came from."""

from __future__ import annotations

import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from dflash_golden import GOLDEN, Rounds
from surefoot.errors import SurefootError
from surefoot.kernels.quant import dense
from surefoot.speculation.proposers.dflash.checkpoint import checkpoint_facts, open_checkpoint
from surefoot.speculation.registry import inspect_drafter
from test_eagle3_drafter import backend_of

FOLDER = GOLDEN / "gguf_drafters"
FILES = {"dflash": "dflash-f32.gguf", "dspark": "dspark-q8_0.gguf", "dflash2": "dflash2-q8_0.gguf"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_folder_that_it_came_from(name: str) -> None:
    """The same config, and the same tensors but for rounding."""
    found = open_checkpoint(str(FOLDER / FILES[name]))
    expected = open_checkpoint(str(GOLDEN / name / "draft"))
    for key, value in vars(expected.config).items():
        if key not in ("layout", "layer"):
            assert getattr(found.config, key) == value, key
    for key, value in vars(expected.config.layer).items():
        if key not in ("bos_token_id", "eos_token_ids"):
            assert getattr(found.config.layer, key) == pytest.approx(value), key
    # A head that is the target's is left out.
    assert set(expected.tensors) - set(found.tensors) <= {"lm_head.weight"}
    for key, tensor in found.tensors.items():
        wanted = dense(expected.tensors[key])
        error = (dense(tensor) - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-7 if name == "dflash" else 5e-3), key


@pytest.mark.parametrize("name", FILES)
def test_its_drafts_are_the_official_ones(name: str) -> None:
    rounds = Rounds(name, backend_of("torch"), FOLDER / FILES[name])
    for number in range(len(rounds)):
        drafts = rounds.begin(number)
        assert drafts.tokens[0].tolist() == rounds.array(number, "draft_tokens").tolist()
        rounds.end(number)


def test_it_is_inspected() -> None:
    facts = inspect_drafter(str(FOLDER / FILES["dspark"]))
    assert facts is not None and facts["kind"] == "DSpark drafter" and facts["layout"] == "gguf"
    assert checkpoint_facts(str(FOLDER / "nothing.gguf"), None) is None


def patched(tmp_path: Path, name: str, old: bytes, new: bytes) -> str:
    data = (FOLDER / FILES[name]).read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path = tmp_path / "changed.gguf"
    path.write_bytes(data.replace(old, new))
    return str(path)


def key(name: str, kind: int, value: bytes) -> bytes:
    return name.encode() + struct.pack("<I", kind) + value


REFUSED: dict[str, tuple[str, bytes, bytes, str]] = {
    "another architecture": (
        "dflash", key("general.architecture", 8, struct.pack("<Q", 6) + b"dflash"),
        key("general.architecture", 8, struct.pack("<Q", 6) + b"qwen39"), "holds a 'qwen39' model",
    ),
    "a key": ("dspark", b"dflash.has_confidence_head", b"dflash.had_confidence_head", "had_conf"),
    "a tensor": ("dspark", b"conf_proj.bias", b"conf_proj.vias", "is not known"),
    "no mask": ("dflash", b"tokenizer.ggml.mask_token_id", b"tokenizer.ggml.musk_token_id", "mask"),
    "a mask beyond": (
        "dflash", key("mask_token_id", 4, struct.pack("<I", 500)),
        key("mask_token_id", 4, struct.pack("<I", 512)), "mask_token_id is 512, beyond",
    ),
    "a long block": (
        "dflash", key("block_size", 4, struct.pack("<I", 8)),
        key("block_size", 4, struct.pack("<I", 64)), "block_size .* is 64",
    ),
    "layers in disorder": (
        "dflash", struct.pack("<iii", 2, 6, 10), struct.pack("<iii", 6, 2, 10), "target_layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, old, new, message = REFUSED[name]
    with pytest.raises(SurefootError, match=message) as caught:
        open_checkpoint(patched(tmp_path, family, old, new))
    assert caught.value.option == "dflash.path"


def test_a_draft_vocabulary_is_stored_by_ids() -> None:
    """Absolute ids there, offsets in safetensors."""
    from surefoot.speculation.proposers.dflash import gguf

    class File:
        path, tensors = Path("x.gguf"), MappingProxyType({"d2t": None})

        def raw(self, tensor: Any) -> torch.Tensor:
            return torch.tensor([3, 5, 9]).view(torch.uint8).view(3, 8)

    file: Any = File()
    assert dense(gguf.read_gguf_tensors(file)["d2t"]).tolist() == [3, 4, 7]
