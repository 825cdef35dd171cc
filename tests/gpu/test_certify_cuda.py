"""The certificate on the device: what is sound passes, every known defect is found, through
recorded rounds and through called ones."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from device_engines import device_decoder

from certify_setups import make_judge, silent
from harness import VOCAB
from surefoot.certify.certificate import certify
from surefoot.certify.defect import Defect
from surefoot.certify.defects import DEFECTS
from surefoot.certify.prompts import default_prompts
from surefoot.certify.selftest import try_defect
from surefoot.certify.sizes import QUICK
from surefoot.certify.subject import Subject
from surefoot.config import EngineConfig

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


@WAYS
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda item: item.install.__name__)
def test_every_known_defect_is_found(defect: Defect, eager: bool) -> None:
    judge = make_judge(subject(enforce_eager=eager))
    if missing := defect.lacks(judge.subject):
        pytest.skip(f"there are no {missing}")
    trial = try_defect(judge, QUICK, defect)
    assert trial.caught and trial.finding, trial
    assert (trial.recorded > 0) != eager
