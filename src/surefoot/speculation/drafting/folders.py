"""A drafter's checkpoint: found, read, and checked against what its config calls for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import dense
from surefoot.models.loading.hub import hub_cache_for
from surefoot.models.loading.lazy import finite
from surefoot.models.loading.safetensors_dir import INDEX, SINGLE, weight_files

PICKLED = "pytorch_model.bin"
_HUB_PATTERNS = ["config.json", "*.safetensors", INDEX, PICKLED, "mask_embedding.pt"]
# Tables that engines compute.
_UNREAD = ("rotary_emb.inv_freq",)
Shapes = Mapping[str, tuple[int, ...]]
Config = TypeVar("Config")


@dataclass(frozen=True)
class DrafterCheckpoint(Generic[Config]):
    """``tensors`` by canonical name, as stored."""

    folder: Path
    config: Config
    tensors: Mapping[str, Weight]
    target_ids: torch.Tensor
    """int64 [draft vocabulary]: the target's id of each draft id."""


@contextmanager
def errors_about(option: str) -> Iterator[None]:
    """Name ``option`` in every SurefootError that comes up."""
    try:
        yield
    except SurefootError as error:
        raise SurefootError(option, error.problem, error.fix) from error


def find_folder(path: str) -> Path:
    """A local folder, or the repository ``org/name`` fetched from the Hugging Face hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise SurefootError("path", f"there is no folder {path!r}", "give a folder or org/name")
    from huggingface_hub import snapshot_download

    cache = hub_cache_for(path)
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_PATTERNS, cache_dir=cache))
    except Exception as error:  # the hub's client lets through its HTTP library's exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SurefootError(
            "path", f"there is no folder {path!r}, and the hub does not give it ({reason})"
        ) from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's files, under names without the prefix ``model.``."""
    return {
        name.removeprefix("model."): tensor
        for name, tensor in _stored_tensors(folder).items()
        if not name.endswith(_UNREAD)
    }


def _stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        from safetensors.torch import load_file

        tensors = {}
        for file in weight_files(folder):
            try:
                loaded = load_file(file)
            except Exception as error:  # safetensors' own type is not exported everywhere
                raise SurefootError("path", f"{file} cannot be read: {error}") from error
            tensors.update(_finite(loaded, file))
        return tensors
    file = folder / PICKLED
    if not file.is_file():
        raise SurefootError("path", f"{folder} has neither {SINGLE} nor {PICKLED}")
    loaded = _unpickled(file)
    if not isinstance(loaded, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in loaded.values()
    ):
        raise SurefootError("path", f"{file} holds something else than tensors")
    return _finite(loaded, file)


def read_tensor_file(file: Path) -> torch.Tensor:
    """The one tensor that ``file`` holds, by itself or in a dictionary."""
    loaded = _unpickled(file)
    if isinstance(loaded, dict) and len(loaded) == 1:
        [loaded] = loaded.values()
    if not isinstance(loaded, torch.Tensor):
        raise SurefootError("path", f"{file} holds something else than one tensor")
    return _finite({file.stem: loaded}, file)[file.stem]


def _unpickled(file: Path) -> Any:
    try:
        # weights_only: nothing in the file is executed.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise SurefootError("path", f"{file} cannot be read: {error}") from error


def _finite(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            finite(tensor, name, file)
    return dict(tensors)


def check_tensors(
    folder: Path, stored: Mapping[str, Weight], expected: Shapes, optional: Shapes
) -> None:
    """Name every tensor that is missing or misshapen, or that nobody would read."""
    problems = [f"{name} is missing" for name in expected if name not in stored]
    for name, tensor in stored.items():
        shape = expected.get(name) or optional.get(name)
        if shape is None:
            problems.append(f"{name} is not known")
        elif tuple(tensor.shape) != shape:
            problems.append(f"{name} is {tuple(tensor.shape)}, expected {shape}")
    if problems:
        raise SurefootError("path", f"{folder} does not fit its config: " + "; ".join(problems))


def vocabulary_shapes(vocab: int, hidden: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    """Tensors that stand in for the target's, and those that map a draft vocabulary to it."""
    return {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (draft_vocab, hidden),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }


def read_target_ids(
    folder: Path, stored: Mapping[str, Weight], vocab: int, draft_vocab: int
) -> torch.Tensor:
    """The target's id of each draft id, int64 [draft_vocab]: ``d2t`` holds offsets, ``t2d`` marks
    the members, and both must agree; without either both vocabularies are one."""
    index = torch.arange(draft_vocab)
    offsets, members = (
        None if (item := stored.get(name)) is None else dense(item) for name in ("d2t", "t2d")
    )
    ids = index if offsets is None else index + offsets.long()
    if offsets is None and members is not None:
        ids = members.bool().nonzero().flatten()
    elif members is not None and not torch.equal(members.bool().nonzero().flatten(), ids):
        raise SurefootError("path", f"d2t and t2d of {folder} disagree about the draft vocabulary")
    if offsets is None and members is None and draft_vocab < vocab:
        raise SurefootError(
            "path", f"{folder} has a draft vocabulary and neither d2t nor t2d says which"
        )
    inside = len(ids) == draft_vocab and bool((ids >= 0).all() and (ids < vocab).all())
    if not inside or len(ids.unique()) != len(ids):
        raise SurefootError("path", f"d2t of {folder} does not map into the target's vocabulary")
    return ids
