"""Drafters of the DFlash family for the engines' target: some that agree with it mostly, and some
that never met it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from dflash_reference import FULL, SLIDING, Flags, Reference, random_checkpoint, random_tensors
from eagle3_engines import target, target_weights
from eagle3_reference import captured_layers
from harness import tiny_config
from surefoot.models.decoder import Decoder

# Windows are shorter than texts, and blocks longer than what is drafted of them.
KINDS = {
    "random": Flags(types=(SLIDING, FULL), window=7),
    "random DSpark": Flags("dspark", "speculators", markov="rnn", draft_vocab=40, anchor=False),
    "random DFlash 2": Flags("dflash2", types=(SLIDING, FULL), window=9, causal=False),
    "skilled": Flags(layout="deepseek", block=4),
    "skilled DSpark": Flags("dspark", "deepseek", rank=32),
    "skilled DFlash 2": Flags("dflash2", rank=32, top_k=48),
}


def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    flags = KINDS[kind]
    tensors = random_tensors(flags, seed=5)
    if not kind.startswith("skilled"):
        return tensors
    # Hidden states are little more than embeddings; what follows a token is what the target's head
    # says of its embedding.
    weights = target_weights()
    embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.05
    scale = embedding.pow(2).mean(1, keepdim=True).rsqrt()
    normed = embedding * scale * norm
    if flags.family == "dflash":
        tensors["norm.weight"] = norm.clone()
        return tensors
    tensors["norm.weight"] *= 0.1
    if flags.family == "dspark":
        tensors["markov_head.markov_w1.weight"] = normed
        tensors["markov_head.markov_w2.weight"] = embedding.clone()
        return tensors
    mask = embedding[flags.mask] * scale[flags.mask] * tensors["norm.weight"]
    tensors["candidate_selector.predecessor_codebook"] = normed
    tensors["candidate_selector.successor_codebook"] = embedding.clone()
    tensors["candidate_selector.hidden_projection.weight"] = (mask / mask.pow(2).sum()).repeat(
        32, 1
    )
    return tensors


EXACT = {
    "DSpark": Flags("dspark", "deepseek", rank=32),
    # No token's own score counts, and all tokens are candidates.
    "DFlash 2": Flags("dflash2", rank=32, top_k=48, multiplier=1e-9),
}


@functools.cache
def forgetful_target() -> Decoder:
    """A target whose layers add nothing: what it says next depends on the current token alone."""
    weights = target_weights()
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    return Decoder(tiny_config(), weights, target().backend)


@functools.cache
def exact_folder(family: str) -> str:
    """A drafter that says exactly what the forgetful target does, given the token before."""
    tensors = tensors_of(f"skilled {family}")
    if family == "DSpark":
        tensors["norm.weight"].zero_()
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    return _kept(EXACT[family], tensors)


@functools.cache
def folder(kind: str) -> str:
    """A checkpoint's folder."""
    return _kept(KINDS[kind], tensors_of(kind))


def _kept(flags: Flags, tensors: dict[str, torch.Tensor]) -> str:
    path = Path(tempfile.mkdtemp(prefix="surefoot-dflash-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    random_checkpoint(path, flags, tensors)
    return str(path)


@functools.cache
def _reference(kind: str, drafts: int | None) -> Reference:
    flags = KINDS[kind]
    if drafts is not None:
        flags = replace(flags, block=flags.block - flags.drafts + drafts)
    return Reference(flags, tensors_of(kind), target_weights()["model.embed_tokens.weight"])


@functools.cache
def by_formulas(kind: str, text: tuple[int, ...], drafts: int | None = None) -> tuple[int, ...]:
    """The greedy drafts after ``text``: all that a block gives, or those of a shorter one."""
    features = captured_layers(target(), list(text[:-1]), KINDS[kind].taps)
    return tuple(_reference(kind, drafts).draft(features, text[-1])[0])
