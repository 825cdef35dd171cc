"""Drafters of the DFlash family against what the official implementations gave for the same
checkpoints: contexts, blocks, heads and drafts, through partial acceptance."""

from __future__ import annotations

import pytest
import torch

from dflash_golden import Rounds
from harness import needs_native
from test_eagle3_drafter import backend_of, near

BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_drafts_equal_the_official_ones(name: str, backend: str) -> None:
    rounds = Rounds(name, backend_of(backend))
    for number in range(len(rounds)):
        drafts = rounds.begin(number)
        expected = rounds.array(number, "draft_tokens")
        assert drafts.tokens[0].tolist() == expected.tolist()
        assert drafts.lengths.tolist() == [len(expected)]
        if name == "dspark":
            near(drafts.confidence[0], rounds.array(number, "confidence"))
        if name == "dflash2":
            scores = rounds.array(number, "path_scores").softmax(dim=1)
            near(drafts.confidence[0], scores.amax(dim=1))
        if backend == "torch":
            check_context(rounds, number)
        rounds.end(number)


def check_context(rounds: Rounds, number: int) -> None:
    bench = rounds.bench
    for layer in range(bench.network.layers):
        keys, values = bench.context(layer, rounds.done)
        if f"r{number}.ctx_k{layer}" in rounds.arrays:
            near(keys, rounds.array(number, f"ctx_k{layer}"))
            near(values, rounds.array(number, f"ctx_v{layer}"))
        else:
            new = rounds.array(number, f"new_ctx_k{layer}")
            near(keys[:, -new.shape[1] :], new)
            near(values[:, -new.shape[1] :], rounds.array(number, f"new_ctx_v{layer}"))
