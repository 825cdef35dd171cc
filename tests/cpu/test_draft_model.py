"""A draft model on ``speculation.drafting``: a small decoder that reads tokens, no features.

It is the target once more, so that whatever it drafts without noise is right, as long as all its
keys are: one that is stale or missing shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from certify_setups import register
from eagle3_engines import target, target_weights
from harness import Job, make_engine, run_alone, run_jobs
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import FlatBatch
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams
from surefoot.speculation.drafting.network import Network
from surefoot.speculation.drafting.proposer import NetworkOptions, NetworkProposer
from surefoot.speculation.proposer import Commits, DraftCost, Drafts
from test_drafter_state import ROUNDS, crowd, speculation
from test_eagle3_engine import some

METHODS = ("off", "ngram", "twin", "auto")


class Twin(Network):
    """All of its layers run in every pass: entries depend on all keys before them."""

    def __init__(self, target: Decoder) -> None:
        config = target.config
        super().__init__(config, {}, torch.arange(config.vocab_size), target)
        positions = self.rope.cos.shape[0]
        self.decoder = Decoder(config, target_weights(), target.backend, positions)

    def step(
        self, features: torch.Tensor | None, batch: FlatBatch, kv: Sequence[Any]
    ) -> torch.Tensor:
        return self.decoder.forward(batch, kv).hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(hidden)


@dataclass(frozen=True)
class TwinOptions(NetworkOptions):
    proposer: ClassVar[str] = "twin"


class TwinProposer(NetworkProposer):
    name = "twin"
    Options = TwinOptions

    def build(self, target: Decoder) -> Network:
        return Twin(target)

    def catch_up(self, commits: Commits) -> None:
        batch = replace(commits.batch, row_slot=commits.row_slot)
        self.network.step(None, batch, self.pools.kv)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, TwinProposer)


def engine_of(ahead: bool, **options: Any) -> Engine:
    values: dict[str, Any] = {"proposers": ("ngram", "twin=weights"), "draft_policy": "fixed"}
    return make_engine(target(), ahead, **{**values, **options})


def check(engine: Engine, jobs: list[Job]) -> int:
    """Texts are plain, and every draft for those who allow the twin is right. Returns how many."""
    texts = [(*job.prompt, *run_alone(target(), job).output) for job in jobs]
    index, learn = engine.controller.names.index("twin"), engine.round.books.learn
    state, seen = engine.state, 0

    def watched(which: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        nonlocal seen
        learn(which, slots, drafts)
        if drafts is None or which != index:
            return
        lengths = engine.controller.lengths[index, slots]
        running = {request.slot for request in engine.scheduler.running}
        rows = zip(slots.tolist(), drafts.tokens.tolist(), lengths.tolist(), strict=True)
        for slot, tokens, length in rows:
            if slot not in running or not engine.controller.allowed[index, slot]:
                continue
            known = tuple(state.history[slot, : int(state.length[slot])].tolist())
            drafted = tuple(tokens[:length])
            assert any(t[: len(known) + length] == known + drafted for t in texts), (known, drafted)
            seen += length

    engine.round.books.learn = watched  # type: ignore[method-assign]
    for text, request in zip(texts, run_jobs(engine, jobs), strict=True):
        assert (*request.prompt, *request.output) == text
    return seen


def test_what_it_needs() -> None:
    engine = engine_of(False, proposers=("twin=weights",))
    [proposer], [need] = engine.proposers, engine.round.needs
    assert isinstance(proposer, TwinProposer)
    assert need.captured_layers == () and need.cost is DraftCost.PER_STEP
    assert need.context_limit == 160 and need.longest_draft == engine.config.max_draft_tokens == 5
    assert len(proposer.pools.kv) == 2
    # Two layers, keys and values of two heads of 16 in float32.
    assert need.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


@ROUNDS
def test_every_draft_is_right(ahead: bool) -> None:
    """Through chunked prompts, prefix hits, preemption and neighbours that do not draft."""
    engine = engine_of(ahead, kv_blocks=24, max_num_batched_tokens=7, max_num_seqs=3)
    jobs = crowd(("off", "auto", "twin", "ngram", "twin", "auto", "off", "twin"), 14, 26, 3)
    assert check(engine, jobs) > 60
    assert engine.stats.preemptions and engine.stats.prefix_hits


@some(10)
@given(
    st.lists(st.sampled_from(METHODS), min_size=2, max_size=6),
    st.integers(0, 20),
    st.integers(2, 12),
    st.integers(0, 6),
    st.sampled_from([22, 26, 80]),
    st.sampled_from([5, 40]),
    st.booleans(),
)
def test_every_draft_is_right_in_any_mixture(
    methods: list[str], shared: int, tokens: int, gap: int, blocks: int, chunk: int, ahead: bool
) -> None:
    engine = engine_of(ahead, kv_blocks=blocks, max_num_batched_tokens=chunk, max_num_seqs=3)
    check(engine, crowd(tuple(methods), shared, tokens, gap))


def test_at_a_temperature_noise_is_the_targets() -> None:
    """The same weights and the same noise: the same tokens."""
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True)
    engine = engine_of(False)
    assert check(engine, [Job((4, 9, 2), params, speculation("twin"))]) > 20
