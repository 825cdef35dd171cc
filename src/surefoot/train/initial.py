"""First weights from a drafter that there is already (``--init-from``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import Weight
from surefoot.kernels.quant import dense
from surefoot.train.parameters import Parameters

OPTION = "init_from"
_OF_LAYERS = (
    "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "qk_norm",
    "rope_theta", "norm_eps",
)  # fmt: skip


def refuse_others(path: str, found: Any, wanted: Any, names: Iterable[str]) -> None:
    """Raise SurefootError if the drafter's config ``found`` differs from the one to be trained in
    one of the fields ``names``, or in the shape of its layers."""
    pairs = [(name, getattr(found.layer, name), getattr(wanted.layer, name)) for name in _OF_LAYERS]
    pairs += [(name, getattr(found, name), getattr(wanted, name)) for name in names]
    for name, has, trained in pairs:
        if has != trained:
            raise SurefootError(
                OPTION,
                f"{path} has {name} = {has}, and {trained} is to be trained",
                "train with the options that it was trained with, or leave it out",
            )


@torch.no_grad()
def take_weights(
    network: Parameters,
    tensors: Mapping[str, Weight],
    path: str,
    rows_of: Mapping[str, torch.Tensor],
) -> None:
    """Set the parameters of ``network`` to those of a drafter's file, dequantised. ``rows_of``: of
    parameters with a row for each token of the vocabulary, int64 [rows of the file]: which rows of
    the network these are; others stay as they are. Parameters that are not trained stay, too."""
    for name, value in network.named_parameters():
        name = name.replace("/", ".")
        if not value.requires_grad:
            continue
        if name not in tensors:
            raise SurefootError(OPTION, f"{path} has no {name}")
        given = dense(tensors[name]).float().to(value.device)
        rows = rows_of.get(name)
        if rows is not None and len(rows) == len(given) and given.shape[1:] == value.shape[1:]:
            kept = (rows >= 0).nonzero().squeeze(1)
            value[rows[kept].to(value.device)] = given[kept.to(value.device)]
        elif given.shape == value.shape:
            value.copy_(given)
        else:
            raise SurefootError(
                OPTION,
                f"{path}: {name} is {list(given.shape)}, and {list(value.shape)} is to be trained",
            )
