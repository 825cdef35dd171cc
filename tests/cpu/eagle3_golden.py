"""The golden drafters on any backend, and where their entries go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from harness import random_weights, tiny_config
from surefoot.kernels.backend import Backend, FlatBatch
from surefoot.kernels.quant import dense
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCK = 4


def golden_target(folder: Path, backend: Backend, vocab: int, hidden: int) -> Decoder:
    """A target of which only the embedding matters."""
    config = tiny_config(
        vocab_size=vocab, hidden_size=hidden, layers=8, max_positions=256, tied_embeddings=True
    )
    weights = random_weights(config)
    embedding = load_file(folder / "target_embed.safetensors")["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding
    return Decoder(config, weights, backend)


class Bench:
    """A golden drafter, its KV, and one request in slot 1 whose blocks lie out of order."""

    def __init__(self, name: str, backend: Backend, vocab: int, hidden: int = 64) -> None:
        folder = GOLDEN / name
        self.target = golden_target(folder, backend, vocab, hidden)
        checkpoint = open_checkpoint(str(folder / "draft"))
        # Tensors mapped from a file need not be aligned as a device's would be.
        tensors = {name: dense(tensor).clone() for name, tensor in checkpoint.tensors.items()}
        self.drafter = Eagle3Drafter(replace(checkpoint, tensors=tensors), self.target)
        self.kv = backend.allocate_kv(1, 40, BLOCK, self.drafter.shape)
        order = torch.randperm(20, generator=torch.Generator().manual_seed(2)) + 3
        self.tables = torch.stack((torch.zeros(20), order)).to(torch.int32)

    def batch(
        self,
        tokens: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        start: int | None = None,
    ) -> FlatBatch:
        """Entries at ``keys``; their RoPE positions are those of the features before."""
        first = int(keys[0]) if start is None else start
        return FlatBatch(
            tokens=tokens,
            positions=keys - 1 if positions is None else positions,
            key_index=keys,
            row_slot=torch.ones_like(keys),
            block_tables=self.tables,
            span_start=torch.tensor([0, first]),
            max_keys=int(keys.max()) + 1,
            mask=mask,
            first_key=1,
        )
