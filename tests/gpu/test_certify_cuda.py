"""The certificate on the device: what is sound passes, every known defect is found, through
recorded rounds and through those that the host plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from device_engines import device_decoder

import test_certify as cpu
from certify_setups import make_judge, silent
from harness import VOCAB
from surefoot.certify.certificate import certify
from surefoot.certify.prompts import default_prompts
from surefoot.certify.sabotage import DEFECTS, Defect
from surefoot.certify.selftest import try_defect
from surefoot.certify.sizes import QUICK
from surefoot.certify.subject import Subject
from surefoot.config import EngineConfig

pytestmark = pytest.mark.gpu
ON_DEVICE = False


def subject(**options: bool) -> Subject:
    config = EngineConfig(device="cuda", **options)  # type: ignore[arg-type]
    return Subject(device_decoder(), config, default_prompts(VOCAB, 160))


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "planned"])
def test_a_sound_engine_passes(eager: bool) -> None:
    certificate = certify(subject(enforce_eager=eager), {}, silent, QUICK, self_test=False)
    assert certificate.reasons == []
    assert certificate.setup["rounds"] == ("planned by the host" if eager else "recorded")
    assert (certificate.total_of("replays") > 500) == (not eager)
    print(certificate.noise, [(len(s.ties), s.seconds) for s in certificate.sections])


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda item: item.install.__name__)
def test_every_known_defect_is_found(defect: Defect) -> None:
    judge = make_judge(subject())
    for install in (defect.install, cpu.in_recorded_rounds_only(defect.install)):
        trial = try_defect(judge, QUICK, replace(defect, install=install))
        assert trial.caught and trial.finding, trial
