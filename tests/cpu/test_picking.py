"""Drafters' tokens: the target's rules on the drafter's logits, drafts counting as text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.upload import sending
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.drafting.picking import Picker
from surefoot.speculation.state import SlotState

VOCAB = 10


def picker(params: SamplingParams, prompt: tuple[int, ...]) -> tuple[Picker, SlotState]:
    """For one request, in slot 0, whose drafter knows the target's tokens 1, 4, 6 and 9."""
    state = SlotState(1, 32, 4, 16, VOCAB, torch.device("cpu"))
    request = Request("r", prompt, params, SpeculationParams(), 0, 32, slot=0)
    with sending(state.device) as uploads:
        state.admit([request], uploads)
    network: Any = SimpleNamespace(
        backend=TorchBackend("cpu", torch.float32), target_ids=torch.tensor([1, 4, 6, 9])
    )
    made = Picker(network, state, coupled=True)
    made.serve(SamplingStages.of([params]))
    return made, state


def test_penalties_see_the_drafts_before() -> None:
    """The drafter would repeat itself; each draft makes its token less likely for the next."""
    made, state = picker(SamplingParams(temperature=0, presence_penalty=1.0), (2, 3))
    logits = torch.tensor([[0.0, 2.0, 1.5, 1.2]])
    slots, picked = torch.tensor([0]), []
    for position in (2, 3, 4, 5):
        tokens, chances = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        made.pick(slots, torch.tensor([position]), logits, (tokens, chances))
        picked.append(tokens.item())
        assert 0 < chances.item() < 1
    # 4 (2.0), 6 (1.5), 9 (1.2), then all have been there and 4 is the best again.
    assert picked == [4, 6, 9, 4]
    assert state.history[0, 2:6].tolist() == picked


def test_penalties_count_no_draft_beyond_the_position() -> None:
    """What an earlier round drafted there is no text."""
    made, state = picker(SamplingParams(temperature=0, repetition_penalty=4.0), (2, 4))
    state.history[0, 2:6] = 9
    tokens, chances = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    logits = torch.tensor([[0.0, 2.0, 1.5, 1.6]])
    made.pick(torch.tensor([0]), torch.tensor([2]), logits, (tokens, chances))
    assert tokens.item() == 9, "4 is in the prompt; 9 is in no text"


def test_candidates_of_trees_see_the_committed_text() -> None:
    made, state = picker(SamplingParams(temperature=0, presence_penalty=1.0), (2, 3))
    state.history[0, 2] = 4  # a draft
    logits = torch.tensor([[0.0, 2.0, 1.5, 1.2]])
    tokens, _ = made.pick_several(torch.tensor([0]), torch.tensor([3]), logits, 3)
    assert tokens.tolist() == [[4, 6, 9]]
    state.length[0] = 3  # now it is committed
    tokens, scores = made.pick_several(torch.tensor([0]), torch.tensor([3]), logits, 3)
    assert tokens.tolist() == [[6, 9, 4]]
    assert torch.allclose(scores[0], torch.tensor([1.5, 1.2, 1.0]) - scores_total())


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.7}, {"top_k": 3}, {"top_k": 9}, {"min_p": 0.1}, {"presence_penalty": 1.0}],
    ids=str,
)
def test_candidates_are_those_of_the_whole_vocabulary(params: dict[str, Any]) -> None:
    """In which the tokens that a drafter lacks have no chance."""
    torch.manual_seed(2)
    made, state = picker(SamplingParams(temperature=0.9, seed=4, **params), (2, 4))
    whole = Picker(SimpleNamespace(backend=made.backend, target_ids=None), state, coupled=True)  # type: ignore[arg-type]
    whole.serve(made.stages)
    logits, wide = torch.randn(3, 4), torch.full((3, VOCAB), float("-inf"))
    wide[:, made.ids] = logits
    slots, places = torch.tensor([0]), torch.tensor([7])
    tokens, scores = made.pick_several(slots, places, logits, 3)
    expected = whole.pick_several(slots, places, wide, 3)
    there = scores.isfinite()
    assert there.any(dim=1).all() and torch.equal(there, expected[1].isfinite())
    assert torch.equal(tokens[there], expected[0][there])
    torch.testing.assert_close(scores, expected[1])


def scores_total() -> torch.Tensor:
    """The other tokens of the target are none of the drafter's."""
    return torch.tensor([0.0, 1.0, 1.5, 1.2]).logsumexp(0)
