"""A tiny target and documents for it, for tests of training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from harness import random_weights, tiny_config
from surefoot.kernels.backend import Backend
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.train.corpus import Batch, Corpus
from surefoot.train.eagle3.options import Eagle3TrainOptions
from surefoot.train.eagle3.recipe import Eagle3Recipe
from surefoot.train.parallel import Workers
from surefoot.train.recipe import Recipe
from surefoot.train.shards import Document, shard_path, write_shard
from surefoot.train.target import Target
from surefoot.train.trainer import Trainer

# On a busy machine torch's threads wait for each other far longer than so little takes.
torch.set_num_threads(1)
LAYERS = 4
DOCUMENTS = [(2, 6)] * 30
SHORT: dict[str, Any] = {"steps": 6, "step_tokens": 64, "batch_tokens": 32, "unroll": 2}
"""A run of few steps, each of two batches."""
VOCAB = 48


@functools.cache
def tiny_target(theta: float = 5000.0, backend: Backend | None = None) -> Target:
    """4 layers, hidden 32, vocabulary 48, context 160; it depends on distant tokens."""
    config = tiny_config(layers=LAYERS, rope_theta=theta)
    weights = random_weights(config)
    chosen = backend or TorchBackend("cpu", torch.float32)
    return Target("tiny", Decoder(config, weights, chosen), weights)


def write_documents(
    folder: Path, lengths: Sequence[tuple[int, int]], seed: int = 0, temperature: float = 0.0
) -> Path:
    """Random documents, each of (prompt, generated) tokens, in one shard."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for index, (prompt, generated) in enumerate(lengths):
        size = (prompt + generated,)
        ids = torch.randint(2, VOCAB, size, generator=generator).tolist()
        documents.append(Document(ids, [(prompt, prompt + generated)], temperature, (index, index)))
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(shard_path(folder, 0), documents, VOCAB, {"dropped": {}})
    return folder


def batch_of(folder: Path, lengths: Sequence[tuple[int, int]], seed: int = 0) -> Batch:
    corpus = Corpus([write_documents(folder, lengths, seed)], 160)
    return corpus.batch(range(len(corpus)), "cpu")


def recipe_of(folder: Path, lengths: Sequence[tuple[int, int]], **options: Any) -> Eagle3Recipe:
    """An EAGLE-3 recipe for the tiny target on random documents."""
    given = {"draft_vocab": 40, "unroll": 3, "max_length": 64, "held_out": 1, **options}
    corpus = Corpus([write_documents(folder, lengths)], 64)
    return Eagle3Recipe(Eagle3TrainOptions(**given), tiny_target(), corpus)


def trainer_of(recipe: Recipe, folder: Path, workers: Workers | None = None) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    own, quiet = workers or Workers(), lambda *_: None
    return Trainer(recipe, folder, own, quiet, quiet)


def check_work(recipe: Recipe) -> None:
    """A step's work is what torch counts of products, forwards and backwards."""
    batch = recipe.corpus.batch(range(3), "cpu")
    works = recipe.target.work, recipe.network.work
    before = sum(work.operations for work in works)
    with FlopCounterMode(display=False) as counter:
        loss, _ = recipe.loss(batch, 1.0, 0)
        loss.backward()
    found = counter.get_flop_counts()["Global"]
    products = found[torch.ops.aten.mm] + found.get(torch.ops.aten.addmm, 0)
    assert sum(work.operations for work in works) - before == products > 0
