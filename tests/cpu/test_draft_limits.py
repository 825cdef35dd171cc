"""How many drafts there may be: the engine's limit, each proposer's own, and its context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from certify_setups import register
from eagle3_engines import SKILLED, skilled_tensors, target
from eagle3_reference import random_checkpoint
from harness import Job, Oracle, make_engine, run_alone, run_jobs, tiny_decoder
from surefoot.certify.subject import Subject
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.request import SamplingParams
from surefoot.speculation.proposer import Drafts, Needs
from surefoot.speculation.trees import ancestors
from tiny_models import tiny_hf_model
from tree_proposers import Bush

ROUNDS = pytest.mark.parametrize("ahead", [False, True], ids=["called", "launched ahead"])


def depths(**options: Any) -> tuple[int, dict[str, int]]:
    """``max_draft_tokens`` and the longest draft by proposer."""
    engine = make_engine(tiny_decoder(), max_num_seqs=2, **options)
    found = {proposer.name: proposer.needs().longest_draft for proposer in engine.proposers}
    assert engine.config.max_draft_tokens == engine.state.max_drafts
    return engine.state.max_drafts, found


def own(**values: dict[str, Any]) -> dict[str, Any]:
    return {"proposer_options": values}


BOTH: dict[str, Any] = {"proposers": ("ngram", "eagle3=dummy")}
ALONE: dict[str, Any] = {"proposers": ("eagle3=dummy",)}


@pytest.mark.parametrize(
    ("options", "most", "expected"),
    [
        ({}, 8, {"ngram": 8}),
        ({"max_draft_tokens": 16}, 16, {"ngram": 16}),
        ({"max_draft_tokens": 0}, 0, {}),
        ({"proposers": ()}, 0, {}),
        (BOTH, 8, {"ngram": 8, "eagle3": 5}),
        (ALONE, 5, {"eagle3": 5}),
        (BOTH | own(eagle3={"draft_tokens": 12}), 12, {"ngram": 8, "eagle3": 12}),
        (BOTH | own(ngram={"draft_tokens": 2}), 5, {"ngram": 2, "eagle3": 5}),
        (BOTH | {"max_draft_tokens": 3}, 3, {"ngram": 3, "eagle3": 3}),
        (ALONE | own(eagle3={"draft_tokens": 20, "top_k": 4, "depth": 7}), 20, {"eagle3": 7}),
        (ALONE | own(eagle3={"draft_tokens": 4}) | {"max_draft_tokens": 4}, 4, {"eagle3": 4}),
    ],
)
def test_every_proposer_has_its_depth_and_the_engine_what_they_need(
    options: dict[str, Any], most: int, expected: dict[str, int]
) -> None:
    assert depths(**options) == (most, expected)


@pytest.mark.parametrize(
    ("options", "option", "message"),
    [
        (own(ngram={"draft_tokens": 9}) | {"max_draft_tokens": 8}, "max_draft_tokens", "= 9"),
        (ALONE | own(eagle3={"draft_tokens": 64}), "eagle3.draft_tokens", "above 63"),
        (own(ngram={"draft_tokens": 0}), "ngram.draft_tokens", "below 1"),
        (ALONE | {"max_draft_tokens": 0}, "max_draft_tokens", "eagle3 cannot draft"),
        (own(ngram={"max_ngram": 3}) | {"max_draft_tokens": 0}, "max_draft_tokens", "ngram cannot"),
        ({"max_draft_tokens": 64}, "max_draft_tokens", "above 63"),
        ({"max_draft_tokens": -1}, "max_draft_tokens", "out of range"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(
    options: dict[str, Any], option: str, message: str
) -> None:
    with pytest.raises(SurefootError, match=message) as caught:
        depths(**options)
    assert caught.value.option == option


def test_a_drafter_that_could_draft_nothing_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_hf_model("llama", tmp_path)
    line = ["generate", "x", "-m", str(model), "--eagle3", "dummy", "--max-draft-tokens"]
    refused = CliRunner().invoke(app, [*line, "0"])
    assert refused.exit_code == 2
    assert (
        "--max-draft-tokens: is 0, so ngram and grammar and eagle3 cannot draft" in refused.stderr
    )


def test_the_certificate_may_draft_less_than_it_is_told() -> None:
    """Its scenarios try shorter drafts, too."""
    options = own(eagle3={"draft_tokens": 6})
    subject = Subject(target(), EngineConfig(**ALONE, **options), ((3, 4, 5),))
    assert subject.max_drafts == 6
    for drafts in (6, 2):
        engine = subject.engine(40, 2, max_draft_tokens=drafts)
        assert engine.proposers[0].needs().longest_draft == drafts
    assert subject.engine(40, 2, max_draft_tokens=0).proposers == []


# --- context ------------------------------------------------------------------------------------

LIMIT = 24
JOB = Job((5, 6, 7, 8, 9), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))


class ShortChains(Oracle):
    """Offers as ever beyond the context that it says it has."""

    name = "short-chains"

    def needs(self) -> Needs:
        return replace(super().needs(), context_limit=LIMIT)


class ShortTrees(Bush):
    name = "short-trees"

    def needs(self) -> Needs:
        return replace(super().needs(), context_limit=LIMIT)


def ends_of_offers(engine: Engine) -> list[int]:
    """Runs the job; how long the text was with each offer, at the deepest draft of it."""
    found, learn, state = [], engine.round.books.learn, engine.state

    def watched(index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        learn(index, slots, drafts)
        if drafts is None:
            return
        lengths = engine.controller.lengths[index, slots]
        deepest = lengths.clone()
        if drafts.parents is not None:
            width = torch.arange(drafts.parents.shape[1])
            depth = ancestors(drafts.parents)[1][:, 1:]
            deepest = torch.where(width < lengths.unsqueeze(1), depth, 0).amax(dim=1)
        running = {request.slot for request in engine.scheduler.running}
        for slot, deep in zip(slots.tolist(), deepest.tolist(), strict=True):
            if slot in running and deep:
                found.append(int(state.length[slot]) + deep)

    engine.round.books.learn = watched  # type: ignore[method-assign]
    [request] = run_jobs(engine, [JOB])
    assert request.output == run_alone(engine.decoder, JOB).output
    assert len(request.output) == 40
    return found


@ROUNDS
@pytest.mark.parametrize("kind", [ShortChains, ShortTrees])
def test_requests_beyond_a_context_lose_its_drafts_and_not_service(
    kind: type[ShortChains] | type[ShortTrees], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, kind)
    text = (*JOB.prompt, *run_alone(tiny_decoder(), JOB).output)
    engine = make_engine(
        tiny_decoder(), ahead, proposers=(kind.name,), draft_policy="fixed", max_draft_tokens=4,
        proposer_options={kind.name: {"texts": (text,)}},
    )  # fmt: skip
    ends = ends_of_offers(engine)
    # Random trees need not go as deep as they may.
    assert max(ends) in range(LIMIT - 3 * (kind is ShortTrees), LIMIT + 1) and len(ends) > 3


@ROUNDS
@pytest.mark.parametrize("tree", [{}, {"top_k": 2, "depth": 3}], ids=["chain", "tree"])
def test_a_drafter_with_fewer_positions_than_the_target(
    tree: dict[str, int], ahead: bool, tmp_path: Path
) -> None:
    random_checkpoint(tmp_path, replace(SKILLED, positions=LIMIT), skilled_tensors())
    options = {"path": str(tmp_path), "draft_tokens": 4, **tree}
    engine = make_engine(
        target(), ahead, proposers=("eagle3",), draft_policy="fixed",
        proposer_options={"eagle3": options},
    )  # fmt: skip
    ends = ends_of_offers(engine)
    # Its positions are those of the features, which are one behind.
    assert max(ends) in ([LIMIT, LIMIT + 1] if tree else [LIMIT + 1]) and len(ends) > 3
