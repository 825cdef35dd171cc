"""The golden drafters of the DFlash family in a proposer with one request, whose blocks lie out of
order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from harness import random_weights, tiny_config
from surefoot.kernels.backend import Backend, FlatBatch
from surefoot.kernels.quant import dense
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposer import Commits, Drafts
from surefoot.speculation.proposers.dflash import proposer
from surefoot.speculation.proposers.dflash.checkpoint import DFlashCheckpoint, open_checkpoint
from surefoot.speculation.proposers.dflash.network import DFlashNetwork
from surefoot.speculation.proposers.dflash.proposer import DFlashOptions, DFlashProposer
from surefoot.speculation.state import SlotState

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCK = 4
SLOT = 1


def golden_target(backend: Backend, tensors: dict[str, torch.Tensor], layers: int = 12) -> Decoder:
    """A target of which only embedding and head matter."""
    tensors = {name: dense(tensor).clone() for name, tensor in tensors.items()}
    embedding = tensors["model.embed_tokens.weight"]
    vocab, hidden = embedding.shape
    head = tensors.get("lm_head.weight")
    config = tiny_config(
        vocab_size=vocab, hidden_size=hidden, layers=layers, max_positions=256,
        tied_embeddings=head is None,
    )  # fmt: skip
    weights = random_weights(config)
    weights["model.embed_tokens.weight"] = embedding
    if head is not None:
        weights["lm_head.weight"] = head
    return Decoder(config, weights, backend)


def open_aligned(path: str) -> DFlashCheckpoint:
    """Tensors mapped from a file need not be aligned as a device's would be."""
    checkpoint = open_checkpoint(path)
    tensors = {name: dense(tensor).clone() for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


class Bench:
    """A drafter in ``folder``, and a request in slot 1."""

    def __init__(self, folder: Path, backend: Backend, tensors: dict[str, torch.Tensor]) -> None:
        target = golden_target(backend, tensors)
        self.state = state = SlotState(2, 60, 15, BLOCK, target.config.vocab_size, backend.device)
        self.proposer = DFlashProposer(DFlashOptions(path=str(folder)), state)
        with patch.object(proposer, "open_checkpoint", open_aligned):
            self.proposer.load(target)
        self.proposer.allocate(40)
        width = state.block_tables.shape[1]
        order = torch.randperm(width, generator=torch.Generator().manual_seed(2)) + 5
        state.block_tables[SLOT] = order.int()

    @property
    def network(self) -> DFlashNetwork:
        return self.proposer.network

    def enter(self, text: list[int]) -> None:
        """What is committed, the current token at the end."""
        self.state.history[SLOT, : len(text)] = torch.tensor(text)
        self.state.length[SLOT] = len(text)

    def catch_up(self, first: int, features: torch.Tensor, settled: int) -> None:
        """The target ran rows from position ``first`` on; ``settled`` of them count."""
        rows = torch.arange(len(features))
        features = features.to(self.network.activations)
        keys, state = first + rows, self.state
        start = torch.zeros(state.slots, dtype=torch.int64)
        start[SLOT] = first
        batch = FlatBatch(
            rows, keys, keys, torch.full_like(rows, SLOT), state.block_tables, start, 100
        )
        one = torch.tensor
        self.proposer.catch_up(Commits(one([SLOT]), one([settled]), one([0]), batch, features))

    def propose(self) -> Drafts:
        return self.proposer.propose(torch.tensor([SLOT]))

    def context(self, layer: int, count: int) -> torch.Tensor:
        """Keys and values of one layer on the torch backend, [2, kv heads, count, head dim]."""
        index = torch.arange(count)
        blocks = self.state.block_tables[SLOT, index // BLOCK].long()
        return self.proposer.pools.kv[layer][:, blocks, index % BLOCK].transpose(1, 2)


class Rounds:
    """A golden case, round by round."""

    def __init__(self, name: str, backend: Backend, draft: Path | None = None) -> None:
        folder = GOLDEN / name
        self.case = json.loads((folder / "case.json").read_text())
        self.arrays = load_file(folder / "rounds.safetensors")
        target = load_file(folder / "target.safetensors")
        self.bench = Bench(draft or folder / "draft", backend, target)
        self.text: list[int] = self.arrays["prompt_ids"].tolist()
        self.done = 0

    def __len__(self) -> int:
        return len(self.case["rounds"])

    def array(self, number: int, name: str) -> torch.Tensor:
        return self.arrays[f"r{number}.{name}"]

    def features(self, number: int) -> torch.Tensor:
        """Of all rows that the target ran, rejected ones too: the captured layers side by side."""
        states = self.array(number, "target_hidden_states")
        return torch.cat([states[layer] for layer in self.bench.network.captured_layers], dim=1)

    def begin(self, number: int) -> Drafts:
        """Settle what the round before left, and draft."""
        told = self.case["rounds"][number]
        assert told["start"] == len(self.text)
        self.bench.enter([*self.text, told["current_token"]])
        self.bench.catch_up(self.done, self.features(number), told["context_rows"])
        self.done = told["start"]
        return self.bench.propose()

    def end(self, number: int) -> None:
        told = self.case["rounds"][number]
        self.text += [told["current_token"], *told["accepted_tokens"]]
        assert told["next_start"] == len(self.text)
