"""What a certificate reaches: near ties, pairs of options, long texts, seeds, crowds, trees."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from certify_setups import SMALL, make_judge, make_subject, native_decoder, one_thread, silent  # noqa: F401
from harness import make_engine, needs_native, tiny_config, tiny_decoder
from surefoot.certify import certificate as making
from surefoot.certify.certificate import certify
from surefoot.certify.combinations import GREEDY_FACTORS, SAMPLED_FACTORS
from surefoot.certify.coverage import coverage
from surefoot.certify.findings import Refusals, Section
from surefoot.certify.jobs import Job, run_jobs
from surefoot.certify.long_texts import boundaries, long_jobs, run_long_texts
from surefoot.certify.near_ties import find_others, refusals
from surefoot.certify.pairs import count_pairs, pairwise
from surefoot.certify.parity import run_parity, seed_of
from surefoot.certify.probes import Others, ProbeOptions, RunnerUpProbe, TreeProbe
from surefoot.certify.sizes import DEFAULT, QUICK, SCENARIOS
from surefoot.certify.subject import MIXED, RUNNER_UP
from surefoot.certify.unseeded import run_unseeded
from surefoot.engine.engine import Engine
from surefoot.kernels.backend import Backend
from surefoot.models.config import RopeScaling
from surefoot.request import MAX_SEED, SamplingParams

INFINITE = float("inf")


@pytest.mark.parametrize("factors", [GREEDY_FACTORS, SAMPLED_FACTORS], ids=["greedy", "sampled"])
def test_a_pairwise_design_has_every_pair_and_few_rows(factors: dict) -> None:
    rows = pairwise(factors, 0)
    seen = {
        (a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(sorted(row), 2)
    }
    assert len(seen) == count_pairs(factors)
    assert len(rows) < 25
    assert pairwise(factors, 0) == rows != pairwise(factors, 1)


def probed(kind: type, text: tuple[int, ...], others: Others, length: int, drafts: int = 4):
    """What a probe offers for a slot whose text is the first ``length`` tokens of ``text``."""
    engine = make_engine(tiny_decoder(), max_draft_tokens=drafts, proposers=("ngram",))
    state = engine.state
    state.history[0, :length] = torch.tensor(text[:length])
    state.length[0] = length
    probe = kind(ProbeOptions((text,), others=(others,)), state)
    return probe.propose(torch.tensor([0]))


def test_a_runner_up_is_offered_at_the_nearest_tie_in_reach() -> None:
    text = tuple(range(3, 13))
    gaps = (INFINITE,) * 4 + (0.5, 0.2, 0.01, 0.3, INFINITE, INFINITE)
    others = Others((-1,) * 4 + (44, 45, 46, 47, -1, -1), gaps)
    near = probed(RunnerUpProbe, text, others, 4)
    assert near.tokens[0, : int(near.lengths[0])].tolist() == [7, 8, 46]
    behind = probed(RunnerUpProbe, text, others, 7)
    assert behind.tokens[0, : int(behind.lengths[0])].tolist() == [47]
    nothing = probed(RunnerUpProbe, text, others, 8)
    assert nothing.tokens[0, : int(nothing.lengths[0])].tolist() == [11, 12]


def test_a_trees_probe_hides_the_right_path() -> None:
    text, length = tuple(range(3, 23)), 5
    others = Others((-1,) * 6 + (40,) * 14, (INFINITE,) * 6 + (0.1,) * 14)
    drafts = probed(TreeProbe, text, others, length)
    assert drafts.parents is not None and drafts.lengths.tolist() == [12]
    tokens, parents = drafts.tokens[0].tolist(), drafts.parents[0].tolist()
    assert all(parent < place for place, parent in enumerate(parents))
    children: dict[int, list[int]] = {}
    for token, parent in zip(tokens, parents, strict=True):
        children.setdefault(parent, []).append(token)
    assert all(len(set(siblings)) == len(siblings) for siblings in children.values())
    assert sorted(children[-1]) in ([text[length], text[length] + 1],) or text[length + 1] in tokens
    # The second best token stands beside the right one, where it is known.
    assert 40 in tokens


@needs_native
def test_refusals_are_counted_by_how_near_they_came() -> None:
    judge = make_judge(make_subject())
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    jobs = [Job(prompt, params) for prompt in judge.subject.prompts[:4]]
    texts = judge.plain_texts(jobs)
    known = tuple((*job.prompt, *text.tokens) for job, text in zip(jobs, texts, strict=True))
    others = find_others(judge, jobs, texts)
    tested = [replace(job, method=RUNNER_UP) for job in jobs]
    engine = judge.subject.engine(90, 4, texts=known, others=others)
    got, activity = run_jobs(engine, tested)
    found = refusals(judge, tested, got, known, others, activity.turned_down)
    assert len(found.gaps) >= activity.rejections[RUNNER_UP] - 4 > 5
    # Every text's nearest tie was tried: the last tokens, which no draft may be, left out.
    for text, other in zip(known, others, strict=True):
        assert any(gap == pytest.approx(min(other.gaps[: len(text) - 1])) for gap in found.gaps)
    # By the plain texts' own logits, not by the engine's.
    assert refusals(judge, jobs, got, known, others, activity.turned_down).gaps == []


@needs_native
def test_long_texts_cross_every_boundary_that_fits() -> None:
    model = native_decoder().config
    assert boundaries(model, QUICK) == [256, 512, 1024]
    assert boundaries(tiny_config(), QUICK) == []
    scaling = RopeScaling("llama3", 8.0, original_max_positions=640)
    assert boundaries(replace(model, rope_scaling=scaling), QUICK) == [256, 512, 640, 1024]
    far = replace(model, rope_scaling=replace(scaling, original_max_positions=8192))
    assert 8192 not in boundaries(replace(far, max_positions=9000), QUICK)
    assert 8192 in boundaries(replace(far, max_positions=9000), DEFAULT)
    judge = make_judge(make_subject())
    assert {len(job.prompt) for job in long_jobs(judge, QUICK)} == {244, 500, 1012}
    section = run_long_texts(judge, SMALL, silent)
    assert section.problems == [] and section.logprobs > 100
    assert section.activity.furthest > 1024 and section.activity.prefix_hits > 500


def test_seeds_are_of_all_sizes() -> None:
    seeds = [seed_of(index) for index in range(64)]
    assert len(set(seeds)) == 64 and all(0 <= seed <= MAX_SEED for seed in seeds)
    assert sum(seed < 1 << 32 for seed in seeds) == 16
    assert len({seed & 0xFFFFFFFF for seed in seeds}) < 64


@needs_native
def test_requests_without_a_seed_are_compared_and_their_seeds_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = make_judge(make_subject())
    section = Section("x")
    run_unseeded(judge, section, SMALL)
    assert section.problems == [] and section.texts == 2 * SMALL.sampled_jobs
    make = Engine.make_request

    def same(self: Engine, *args: object, **named: object):
        request = make(self, *args, **named)  # type: ignore[arg-type]
        request.seed = 7
        return request

    monkeypatch.setattr(Engine, "make_request", same)
    section = Section("x")
    run_unseeded(judge, section, SMALL)
    assert "got 1 different seeds" in section.problems[0]


@needs_native
def test_a_crowd_is_as_large_as_the_configuration_allows() -> None:
    judge = make_judge(make_subject(max_num_seqs=24))
    crowd = [scenario for scenario in SCENARIOS if scenario.crowd]
    section = run_parity(judge, replace(SMALL, scenarios=tuple(crowd)), False, silent)
    assert section.activity.most == 24 and section.activity.crowded > 10
    assert section.problems == []


@needs_native
def test_it_goes_on_until_counts_are_reached() -> None:
    """As far as the size allows, which is said."""
    size = replace(SMALL, greedy_length=30, min_near=0, min_positions=0, min_accepted=0)
    size = replace(size, min_rejections=0, min_verified=1, min_offers=0)
    first = certify(make_subject(), {}, silent, size, False)
    assert first.more == 0 and not any("accepted" in text for text in first.reasons)
    enough = first.total("accepted", ("ngram",)) + 40
    size = replace(size, min_accepted=enough, more=8)
    certificate = certify(make_subject(), {}, silent, size, False)
    assert 0 < certificate.more < 8 and certificate.total("accepted", ("ngram",)) >= enough
    assert not any("accepted" in text for text in certificate.reasons)
    never = replace(size, more=2, min_accepted=1 << 40)
    certificate = certify(make_subject(), {}, silent, never, False)
    assert certificate.more == 2
    assert any("after 2 batches of further texts" in text for text in certificate.reasons)
    assert certificate.sections[-2].name == making.MORE


@needs_native
def test_what_is_not_covered_is_said() -> None:
    subject = make_subject(max_num_seqs=64)
    certificate = certify(subject, {}, silent, SMALL, self_test=False)
    covered, missing = coverage(certificate, subject)
    assert certificate.covered == covered and certificate.not_covered == missing
    words = "\n".join(missing)
    for part in ("Batches of more than", "Positions from", "Trees", "Stop strings", "Recorded"):
        assert part in words
    assert "256, 512, 1,024" in "\n".join(covered)


def test_what_would_have_been_seen_goes_by_the_nearest_runner_up() -> None:
    every = Refusals([0.3])
    every.add(Refusals([0.04, 0.7], likelier=2))
    assert every.nearest == 0.04 and every.near == 1
    assert every.to_json()["within"] == {"0.01": 0, "0.05": 1, "0.5": 2}
    assert Refusals().to_json()["nearest"] is None


def test_probes_of_a_mixed_batch_have_every_kind_of_limit() -> None:
    from surefoot.certify.arranging import arranged

    [scenario] = [item for item in SCENARIOS if item.drafts_by == "mixed"]
    subject = make_subject("torch")
    job = Job(subject.prompts[0], SamplingParams(max_tokens=9))
    found = {
        (item.method, item.max_drafts)
        for item in (arranged(job, scenario, place, 3, subject, 8) for place in range(16))
    }
    assert {("off", None), ("auto", None), (MIXED, 1), ("ngram", 0), ("ngram", 4)} <= found


def test_blocks_are_as_small_as_the_kernels_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones are refused by the engine, for they would change texts."""
    sizes = []
    made = Engine.__init__

    def engine(self: Engine, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        sizes.append(self.config.block_size)

    monkeypatch.setattr(Engine, "__init__", engine)
    monkeypatch.setattr(Backend, "smallest_block", lambda *_: 8)
    certificate = certify(make_subject(), {}, silent, SMALL, self_test=False)
    assert certificate.disproofs == []
    assert set(sizes) == {8, 16}
