"""The certificate passes what is sound, and finds what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from certify_setups import SMALL, make_judge, make_subject, one_thread, register, silent  # noqa: F401
from harness import VOCAB, make_engine, needs_native, random_weights, tiny_config, tiny_decoder
from surefoot.certify import selftest
from surefoot.certify.certificate import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Certificate,
    calibration_texts,
    certify,
    go_on,
)
from surefoot.certify.compare import Judge
from surefoot.certify.defect import Defect
from surefoot.certify.defects import DEFECTS
from surefoot.certify.findings import Difference, Refusals, Section
from surefoot.certify.html import page
from surefoot.certify.jobs import Job, Outcome, run_jobs
from surefoot.certify.more import MORE
from surefoot.certify.noise import Noise, measure_noise
from surefoot.certify.offers import OFFERS
from surefoot.certify.parity import run_parity
from surefoot.certify.prompts import default_prompts
from surefoot.certify.selftest import try_defect
from surefoot.certify.sizes import QUICK, SCENARIOS
from surefoot.certify.subject import Subject
from surefoot.certify.terminal import show
from surefoot.cli.main import app
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.engine.stats import Progress
from surefoot.errors import SurefootError
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from tiny_models import tiny_hf_model
from tree_proposers import Bush

TRIED = 3
"""Defects in the self-test here; all of them are in ``test_certify_defects``."""


class Never(Proposer):
    """Has nothing to offer."""

    name = "never"

    class Options:
        __dataclass_fields__ = {}  # noqa: RUF012

    def needs(self) -> Needs:
        return Needs(longest_draft=1)

    def propose(self, slots: torch.Tensor) -> Drafts:
        tokens = torch.zeros((len(slots), 1), dtype=torch.int64)
        return Drafts(tokens, torch.zeros_like(slots), torch.zeros((len(slots), 1)))


class Wrong(Never):
    """Offers the same token always, which the bias of a tiny model never makes."""

    name = "wrong"
    replayable = False

    def propose(self, slots: torch.Tensor) -> Drafts:
        last = self.state.history[slots, self.state.length[slots] - 1]
        tokens = ((last * 7 + 5) % VOCAB).unsqueeze(1)
        return Drafts(tokens, torch.ones_like(slots), torch.full((len(slots), 1), 0.5))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Never, Wrong)


@needs_native
def test_a_sound_engine_passes_at_the_quick_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "DEFECTS", DEFECTS[:TRIED])
    certificate = certify(make_subject(), {"model": "tiny <b>"}, silent, QUICK)
    assert certificate.reasons == []
    assert certificate.result == PASS
    assert certificate.noise.regret_bound == 0
    assert certificate.parity_positions >= QUICK.min_positions
    assert not any(section.ties for section in certificate.sections)
    assert certificate.trials is not None and len(certificate.trials) == TRIED
    assert all(trial.caught for trial in certificate.trials)
    assert certificate.more == 0
    check_outputs(certificate)


def check_outputs(certificate: Certificate) -> None:
    everything = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
    assert everything["result"] == PASS
    assert everything["positions_compared"] == certificate.parity_positions
    text = page(certificate)
    assert "tiny &lt;b&gt;" in text and "<b>" not in text
    assert "http" not in text and "<script" not in text and text.count("<svg") >= 3
    from rich.console import Console

    from surefoot.certify.terminal import show

    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    show(certificate, console)
    written = console.export_text()
    assert "PASS" in written and f"{TRIED} of {TRIED} known defects found" in written
    assert "Not covered:" in written and "Trees: no proposer under test" in written


class RowNoise(TorchBackend):
    """Logits that move with the number of rows they are computed with, as on a GPU."""

    size = 0.02

    def head(self, norm: Any, eps: float, linear: Any, x: torch.Tensor) -> torch.Tensor:
        logits = super().head(norm, eps, linear, x)
        ids = torch.arange(logits.shape[1])
        return logits + self.size * torch.sin(1.7 * ids * (1 + len(x) % 13))


def test_noise_of_the_batch_makes_ties_and_every_tie_is_explained() -> None:
    decoder = Decoder(tiny_config(), random_weights(tiny_config()), RowNoise("cpu", torch.bfloat16))
    subject = Subject(decoder, EngineConfig(), default_prompts(VOCAB, 160))
    judge = make_judge(subject)
    assert 0.02 < judge.noise.regret_bound < 0.2 and judge.noise.plausible
    for sampled in (False, True):
        section = run_parity(judge, replace(QUICK, scenarios=SCENARIOS[:3]), sampled, silent)
        assert section.problems == []
        assert section.ties and section.positions > 500


@needs_native
def test_a_sound_engine_passes_through_recorded_rounds() -> None:
    subject = replace(make_subject(), recorded=True)
    certificate = certify(subject, {}, silent, QUICK, self_test=False)
    assert certificate.reasons == []
    assert certificate.setup["rounds"] == "recorded"
    written = certificate.to_json()
    assert written["rounds"]["recorded"] > 500 and written["rounds"]["called"] == 0
    # Offers of called rounds are checked beside those of recorded ones.
    assert certificate.sections[-1].activity.called > 50
    assert all(section.activity.replays > 10 for section in certificate.sections)
    situations = certificate.sections[-1].details["ngram"]["situations"]
    assert sum(count for name, count in situations.items() if "recorded" in name) >= 8


@needs_native
def test_a_defect_fails_the_certificate() -> None:
    subject = replace(make_subject(), sabotage=DEFECTS[1].install)
    certificate = certify(subject, {}, silent, SMALL, self_test=False)
    assert certificate.result == FAIL
    [section] = [s for s in certificate.sections if s.name == "greedy parity"]
    worst = section.divergences[0]
    assert worst.regret > worst.bound and worst.plain_regret == 0
    text = page(certificate)
    assert "Worst regrets" in text and "No self-test" in text
    json.dumps(certificate.to_json(), allow_nan=False)


@pytest.mark.parametrize("token", [VOCAB, -1])
@needs_native
def test_a_token_that_there_is_not_fails_every_section(token: int) -> None:
    """A broken engine on a GPU reads whatever lies there; no reference can go on behind it."""

    def impossible(engine: Engine, speculative: bool) -> None:
        step = engine.step

        def broken() -> list[Progress]:
            progress = step()
            return [*progress[:-1], *(item._replace(tokens=[token]) for item in progress[-1:])]

        if speculative:
            engine.step = broken  # type: ignore[method-assign]

    subject = replace(make_subject(), sabotage=impossible)
    certificate = certify(subject, {}, silent, SMALL, self_test=False)
    assert certificate.result == FAIL and certificate.sections[-1].name == OFFERS
    for section in certificate.sections:
        assert section.name == MORE or "of a vocabulary of" in section.problems[0], section.name
    # What was run until then counts: a self-test wants to know whether rounds were recorded.
    assert certificate.sections[0].activity.called
    assert "of a vocabulary of" in page(certificate)
    console = Console(file=StringIO(), width=200)
    show(certificate, console)
    assert "of a vocabulary of" in cast(StringIO, console.file).getvalue()
    # And where counts are missing, though nothing failed so far.
    certificate = Certificate({"proposers": ["ngram"]}, replace(SMALL, more=2), measure(subject))
    go_on(certificate, Judge(subject, certificate.noise), silent)
    [section] = certificate.sections
    assert len(section.problems) == 1 == certificate.more
    trial = try_defect(make_judge(make_subject()), SMALL, Defect("x", impossible, "greedy parity"))
    assert trial.caught and "vocabulary" in trial.finding


def measure(subject: Subject) -> Noise:
    return measure_noise(subject.decoder, calibration_texts(subject))


@needs_native
def test_a_self_test_that_finds_nothing_leaves_the_certificate_inconclusive() -> None:
    def harmless(engine: Engine, speculative: bool) -> None:
        pass

    trial = try_defect(make_judge(make_subject()), SMALL, Defect("x", harmless, "greedy parity"))
    assert not trial.caught
    certificate = _finished(trials=[trial])
    assert certificate.result == INCONCLUSIVE and "self-test" in certificate.reasons[0]


def _finished(**changes: Any) -> Certificate:
    """A certificate that passes, as far as it goes, before ``changes``."""
    subject = make_subject()
    names = list(subject.proposers)
    section = Section("greedy parity", positions=QUICK.min_positions)
    activity = section.activity
    for counter in (activity.verified, activity.accepted, activity.rejections):
        counter[names[0]] = 10_000
    activity.preemptions = activity.prefix_hits = activity.chunked = activity.cancellations = 1
    activity.crowded, section.refusals = 1000, Refusals([0.01] * 100)
    noise = make_judge(subject).noise
    setup = {"proposers": names, "probes": [], "requests": 32, "rounds": "called"}
    values = {"setup": setup, "size": QUICK, "noise": noise}
    return Certificate(**{**values, "sections": [section], **changes})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: setattr(c.sections[0], "positions", 1), "positions compared"),
        (lambda c: c.sections[0].activity.verified.clear(), "were verified"),
        (lambda c: c.sections[0].activity.accepted.clear(), "were accepted"),
        (lambda c: c.sections[0].activity.rejections.clear(), "had a draft rejected"),
        (lambda c: setattr(c.sections[0].activity, "crowded", 3), "beside more than 16 requests"),
        (lambda c: setattr(c.sections[0], "refusals", Refusals([0.2] * 99)), "runners-up within"),
        (lambda c: setattr(c.sections[0].activity, "preemptions", 0), "no request was preempted"),
        (lambda c: setattr(c.sections[0].activity, "cancellations", 0), "no request was cancelled"),
        (lambda c: setattr(c, "noise", replace(c.noise, largest_spread=1.0)), "suspect"),
    ],
)
@needs_native
def test_too_little_evidence_is_inconclusive(
    spoil: Callable[[Certificate], None], reason: str
) -> None:
    certificate = _finished()
    assert certificate.result == PASS
    spoil(certificate)
    assert certificate.result == INCONCLUSIVE
    assert any(reason in text for text in certificate.reasons), certificate.reasons


@pytest.mark.parametrize(("name", "reason"), [("never", "verified"), ("wrong", "accepted")])
@needs_native
def test_a_proposer_without_accepted_drafts_is_inconclusive(name: str, reason: str) -> None:
    size = replace(
        SMALL, greedy_jobs=16, greedy_length=60, scenarios=SCENARIOS[:6], min_accepted=90
    )
    certificate = certify(make_subject(proposers=(name,)), {}, silent, size, self_test=False)
    assert certificate.result == INCONCLUSIVE
    assert any(f"drafts of {name} were {reason}" in text for text in certificate.reasons)


def test_what_cannot_be_certified_is_refused() -> None:
    with pytest.raises(SurefootError, match="proposers"):
        make_subject("torch", proposers=())
    with pytest.raises(SurefootError, match="max_draft_tokens"):
        make_subject("torch", max_draft_tokens=0)


@needs_native
def test_rows_of_trees_are_measured_where_a_proposer_offers_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their keys lie elsewhere, but are added up as a chain's."""
    subject = make_subject()
    texts = calibration_texts(subject)
    chains, trees = (measure_noise(subject.decoder, texts, each) for each in (False, True))
    assert chains.bit_exact and "rows of a tree" not in chains.compositions
    assert "rows of a tree" in trees.compositions
    assert trees.bit_exact and not subject.trees
    register(monkeypatch, Bush)
    bushy = make_subject(proposers=("bush",))
    assert bushy.trees and bushy.engine(64, 1).deterministic


@needs_native
def test_where_no_bit_moves_nothing_is_a_tie() -> None:
    """Not even a token whose score is as good as the best one's on fresh logits."""
    subject = make_subject()
    judge = make_judge(subject)
    assert judge.noise.bit_exact and "Bit-exact" in judge.noise.statement
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    difference = Difference("here", 1, 5, 6, 0.0, 0.0, 0.0, ())
    assert not difference.tie and replace(difference, bound=1e-6).tie
    job = Job(subject.prompts[0], replace(params, temperature=0.7, seed=1))
    [want] = judge.plain_texts([job])
    other = Outcome([(want.tokens[0] + 1) % VOCAB, *want.tokens[1:]], "length")
    section = Section("x")
    judge.compare(section, "here", job, want, other)
    assert section.divergences[0].bound == 0 and not section.ties


@needs_native
def test_every_position_after_a_tie_is_compared() -> None:
    """A tested text that takes the second best token counts as a tie if the bound allows it, and
    is compared with plain decoding from there on; a third wrong token is found behind it."""
    subject = make_subject()
    noise = replace(make_judge(subject).noise, largest_spread=50.0)
    judge = Judge(subject, noise)
    job = Job(subject.prompts[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    [want] = judge.plain_texts([job])
    other = (want.tokens[4] + 1) % VOCAB
    branch = [*want.tokens[:4], other]
    [tail] = judge.plain_texts([replace(job, start=tuple(branch))])
    assert tail.tokens[:5] == branch and len(tail.tokens) == 20

    section = Section("x")
    judge.compare(section, "here", job, want, tail)
    assert (len(section.ties), section.positions, section.problems) == (1, 20, [])
    assert section.ties[0].position == 4

    strict = Judge(subject, replace(noise, largest_spread=0.0))
    section = Section("x")
    strict.compare(section, "here", job, want, tail)
    assert len(section.divergences) == 1 and section.positions == 5

    wrong = Outcome([*tail.tokens[:9], (tail.tokens[9] + 3) % VOCAB, *tail.tokens[10:]], "length")
    section = Section("x")
    judge.compare(section, "here", job, want, wrong)
    assert [tie.position for tie in section.ties][:2] == [4, 9]


@pytest.mark.parametrize(
    "change",
    [
        lambda o: replace(o, tokens=o.tokens[:-1]),
        lambda o: replace(o, tokens=[*o.tokens, 3]),
        lambda o: replace(o, finish="stop"),
        lambda o: replace(o, stop_reason=7),
        lambda o: replace(o, logprobs=o.logprobs[:-1]),
        lambda o: replace(o, logprobs=[replace(o.logprobs[0], logprob=-9.0), *o.logprobs[1:]]),
        lambda o: replace(o, prompt_logprobs=o.prompt_logprobs[:-1]),
    ],
)
@needs_native
def test_endings_and_logprobs_are_compared(change: Callable[[Outcome], Outcome]) -> None:
    subject = make_subject()
    judge = make_judge(subject)
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    job = Job(subject.prompts[0], params)
    [want] = judge.plain_texts([job])
    for outcome, problems in ((want, 0), (change(want), 1)):
        section = Section("x")
        judge.compare(section, "here", job, want, outcome)
        assert bool(section.problems) == bool(problems), section.problems


@needs_native
def test_plain_decoding_is_anchored_to_a_fresh_prefill() -> None:
    """What both sides share cannot show in a comparison; the anchor sees it."""
    subject = make_subject()
    judge = make_judge(subject)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=4, max_tokens=12, ignore_eos=True)
        job = Job(subject.prompts[1], params)
        [text] = judge.plain_texts([job])
        section = Section("x")
        judge.anchor(section, [job], [text])
        assert not section.problems
        swapped = replace(text, tokens=[*text.tokens[:5], 1, *text.tokens[6:]])
        judge.anchor(section, [job], [swapped])
        assert len(section.problems) == 1


def test_leaked_blocks_are_noticed() -> None:
    engine = make_engine(tiny_decoder("torch"), max_draft_tokens=0)
    job = Job((3, 4, 5), SamplingParams(temperature=0, max_tokens=3))
    _, activity = run_jobs(engine, [job])
    assert activity.leaks == 0
    engine.kv.pool.allocate(1)
    _, activity = run_jobs(engine, [job])
    assert activity.leaks == 1


@needs_native
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"min_positions": 400, "min_verified": 20, "min_accepted": 1, "min_rejections": 20}
    size = replace(SMALL, scenarios=SCENARIOS[:6], greedy_length=40, min_offers=1, **few)
    size = replace(size, min_near=0)
    monkeypatch.setattr("surefoot.certify.sizes.QUICK", size)
    model = tiny_hf_model("llama", tmp_path)
    where, sheet = tmp_path / "result.json", tmp_path / "result.html"
    line = ["certify", str(model), "--dtype", "float32", "--threads", "1", "--quick"]
    line += ["--no-self-test", "--json", str(where), "--html", str(sheet)]
    result = CliRunner().invoke(app, line)
    written = json.loads(where.read_text())
    assert result.exit_code == 0, result.output
    assert written["result"] == PASS and written["self_test"] is None
    assert written["setup"]["backend"] == "native" and written["setup"]["dtype"] == "float32"
    assert "PASS (without a self-test" in result.output
    assert "not tested" not in result.output
    assert sheet.read_text().startswith("<!doctype html>")
