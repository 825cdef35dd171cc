"""Logprobs of rounds that need no host, held to logits of the finished texts, computed anew."""

from __future__ import annotations

import pytest
import torch

from harness import Job, fresh_logits, make_engine, run_jobs, tiny_decoder
from surefoot.engine.engine import Engine
from surefoot.kernels.logprobs import row_logprobs
from surefoot.request import MAX_LOGPROBS, SamplingParams, SpeculationParams
from surefoot.sampling.logprobs import unpack, width_for
from test_tree_rounds import target, tree_engine

WIDTHS_WANTED = (None, 0, 1, 6, None, 3)


def jobs(most: int) -> list[Job]:
    """Some want logprobs, more or fewer of them; greedy, drawn and penalised side by side."""
    made = []
    for index, width in enumerate(WIDTHS_WANTED):
        params = SamplingParams(
            temperature=0.0 if index % 2 else 0.9,
            seed=index,
            max_tokens=12 + 5 * index,
            logprobs=None if width is None else min(width, most),
            frequency_penalty=0.5 if index == 3 else 0.0,
            ignore_eos=True,
        )
        made.append(Job((5, 9, 5, 9, 5 + index), params, SpeculationParams("auto")))
    return made


def check(engine: Engine, most: int) -> int:
    """The texts' logprobs are those of logits over the whole text. Returns drafts accepted."""
    work = jobs(most)
    accepted = 0
    for job, request in zip(work, run_jobs(engine, work), strict=True):
        width = job.params.logprobs
        accepted += request.stats.accepted
        if width is None:
            assert not request.logprobs
            continue
        logits = fresh_logits(engine.decoder, request.tokens).double()
        first = len(request.prompt) - 1
        assert [x.token_id for x in request.logprobs] == request.output
        for at, found in enumerate(request.logprobs, start=first):
            expected = logits[at].log_softmax(-1)
            assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-4)
            assert found.rank == 1 + int((expected > expected[found.token_id] + 1e-6).sum())
            best = expected.topk(min(width, len(expected)))
            assert len(found.top) == len(best.values)
            assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert all(
                float(expected[token]) == pytest.approx(p, abs=1e-4) for token, p in found.top
            )
    assert engine.stats.replays == engine.stats.rounds > 5
    return accepted


@pytest.mark.parametrize("most", [6, MAX_LOGPROBS])
def test_chains(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_recorded_logprobs.WIDTHS_WANTED", (None, 0, 1, most, None, 3))
    plain = run_jobs(make_engine(tiny_decoder(), False, max_num_seqs=1, kv_blocks=200), jobs(most))
    texts = tuple((*request.prompt, *request.output) for request in plain)
    engine = make_engine(
        tiny_decoder(), True, max_num_seqs=6, kv_blocks=200, max_draft_tokens=4,
        proposers=("oracle",), proposer_options={"oracle": {"texts": texts}}, draft_policy="fixed",
    )  # fmt: skip
    assert check(engine, most) > 30


def test_trees() -> None:
    """The accepted path is not the first rows of its span."""
    engine = tree_engine(True, max_num_seqs=6, kv_blocks=400, block_size=4)
    assert engine.decoder is target()
    assert check(engine, 6) > 10


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("vocab", [40, 16 * 5, 16 * 7])
def test_scores_are_those_of_a_softmax(vocab: int, width: int) -> None:
    torch.manual_seed(vocab)
    logits, tokens = torch.randn(150, vocab), torch.randint(0, vocab, (150,))
    packed, expected = row_logprobs(logits, tokens, width), logits.log_softmax(-1)
    order = expected.sort(dim=-1, descending=True)
    for narrow in {0, min(width, 2), width}:
        for row, one in enumerate(unpack(packed, tokens.tolist(), narrow)):
            assert one.token_id == tokens[row]
            assert one.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
            assert one.rank == 1 + int((logits[row] > logits[row, tokens[row]]).sum())
            assert [p for _, p in one.top] == pytest.approx(
                order.values[row, :narrow].tolist(), abs=1e-5
            )
            assert [token for token, _ in one.top] == order.indices[row, :narrow].tolist()


def test_widths_serve_what_is_wanted() -> None:
    for wanted in range(MAX_LOGPROBS + 1):
        assert wanted <= width_for(wanted) <= MAX_LOGPROBS
    assert width_for(0) == 0
