"""Drafters of the DFlash family against what the official implementations gave for the same
checkpoints: contexts and drafts, through partial acceptance, on every backend."""

from __future__ import annotations

import pytest
import torch

from dflash_golden import SLOT, Rounds
from harness import needs_native
from surefoot.kernels.backend import Backend
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.proposer import DraftRequest
from test_eagle3_drafter import backend_of, near

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ["torch", pytest.param("native", marks=needs_native), "triton"]
FAMILIES = pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])


@pytest.mark.parametrize("backend", BACKENDS)
@FAMILIES
def test_drafts_equal_the_official_ones(name: str, backend: str) -> None:
    """Triton's kernels are interpreted, so that two rounds have to do."""
    rounds = Rounds(name, backend_of(backend))
    for number in range(2 if backend == "triton" else len(rounds)):
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


@pytest.mark.parametrize("backend", BACKENDS)
@FAMILIES
def test_in_bf16_hardly_a_draft_is_another(name: str, backend: str) -> None:
    """Heads and copies of the target's in the file are of the backend's type, too."""
    made = backend_of(backend)
    chosen: Backend = TorchBackend("cpu", torch.bfloat16)
    if backend != "torch":
        again = {"dtype": torch.bfloat16} | ({"device": "cpu"} if backend == "triton" else {})
        chosen = type(made)(**again)
    rounds = Rounds(name, chosen)
    expected = rounds.array(0, "draft_tokens")
    # Behind a draft that is another, others may be, too.
    assert int((rounds.begin(0).tokens[0] == expected).sum()) >= len(expected) - 3


@FAMILIES
def test_drafts_at_a_temperature_are_the_same_on_every_backend(name: str) -> None:
    """The same noise through the same walk; a request at temperature 0 beside it is greedy."""
    found = []
    for backend in ("torch", "triton"):
        rounds = Rounds(name, backend_of(backend))
        rounds.begin(0)
        state, proposer = rounds.bench.state, rounds.bench.proposer
        state.params.temperature[SLOT], state.params.seed[SLOT] = 0.7, 11
        # Slot 0 has the same text and the same blocks.
        for table in (state.history, state.length, state.block_tables):
            table[0] = table[SLOT]
        proposer.expect(DraftRequest(SamplingStages(noise=True)))
        drafts = proposer.propose(torch.tensor([SLOT, 0]))
        assert drafts.tokens[1].tolist() == rounds.array(0, "draft_tokens").tolist()
        assert drafts.tokens[0].tolist() != drafts.tokens[1].tolist()
        found.append(drafts)
    assert torch.equal(found[0].tokens, found[1].tokens)
    near(found[0].confidence, found[1].confidence)
