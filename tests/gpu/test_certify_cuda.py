"""The certificate on the device: what is sound passes, every known defect is found, through
recorded rounds and through called ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from device_engines import device_decoder

from certify_setups import SMALL, make_judge, silent
from harness import VOCAB, random_weights, tiny_config
from surefoot.certify.certificate import certify
from surefoot.certify.defect import Defect
from surefoot.certify.defects import DEFECTS
from surefoot.certify.prompts import default_prompts
from surefoot.certify.selftest import try_defect
from surefoot.certify.sizes import QUICK, SCENARIOS
from surefoot.certify.subject import Subject
from surefoot.config import EngineConfig
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.models.decoder import Decoder

pytestmark = pytest.mark.gpu
ON_DEVICE = False
WAYS = pytest.mark.parametrize("eager", [False, True], ids=["recorded", "called"])


def subject(**options: bool) -> Subject:
    config = EngineConfig(device="cuda", **options)  # type: ignore[arg-type]
    return Subject(device_decoder(), config, default_prompts(VOCAB, 160))


@WAYS
def test_a_sound_engine_passes(eager: bool) -> None:
    certificate = certify(subject(enforce_eager=eager), {}, silent, QUICK, self_test=False)
    assert certificate.reasons == []
    assert certificate.setup["rounds"] == ("called" if eager else "recorded")
    for event, seen in (("replays", not eager), ("called", eager)):
        assert (certificate.total_of(event) > 500) == seen
    print(certificate.noise, [(len(s.ties), s.seconds) for s in certificate.sections])


def test_in_bf16_nothing_is_a_tie() -> None:
    """Heads as the Hopper kernels take them, in blocks of every size that the certificate has."""
    shape = tiny_config(hidden_size=128, heads=4, kv_heads=2, head_dim=64, max_positions=1100)
    decoder = Decoder(shape, random_weights(shape), TritonBackend("cuda", torch.bfloat16))
    tested = Subject(decoder, EngineConfig(device="cuda"), default_prompts(VOCAB, 160))
    size = replace(SMALL, greedy_jobs=8, greedy_length=40, scenarios=SCENARIOS[:4])
    certificate = certify(tested, {}, silent, size, self_test=False)
    assert certificate.noise.bit_exact
    assert certificate.disproofs == []
    assert certificate.total_of("replays") > 50


@WAYS
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda item: item.install.__name__)
def test_every_known_defect_is_found(defect: Defect, eager: bool) -> None:
    judge = make_judge(subject(enforce_eager=eager))
    if missing := defect.lacks(judge.subject, judge.noise.regret_bound):
        pytest.skip(f"there are no {missing}")
    trial = try_defect(judge, QUICK, defect)
    assert trial.caught and trial.finding, trial
    assert (trial.recorded > 0) != eager
