"""When garbage is collected: not while a graph is recorded, and never old things over and over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_harness import emoji_model
from surefoot import LLM, SamplingParams
from surefoot.bench.measure import run_batch
from surefoot.bench.sweep import PLAIN, Load, run_pass
from surefoot.engine.garbage import BETWEEN, no_collections, only_new_garbage
from surefoot.engine.stats import Progress


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    collects = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if collects else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_not_collected_meanwhile_and_then_as_before(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    with pytest.raises(RuntimeError), no_collections():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled() == before


def test_only_what_is_new_is_looked_through() -> None:
    before = len(gc.get_objects())
    with pytest.raises(RuntimeError), only_new_garbage():
        assert len(gc.get_objects()) < before / 10
        raise RuntimeError
    assert len(gc.get_objects()) > before / 2 and not gc.get_freeze_count()


@pytest.mark.parametrize("before", [700, 0, 80_000])
def test_rounds_are_not_interrupted(before: int) -> None:
    """Each makes objects by the hundred, and drops those of the last one."""
    collected, known = list[str](), gc.get_threshold()
    gc.callbacks.append(lambda phase, _: collected.append(phase))
    gc.set_threshold(before, 5, 7)
    try:
        with only_new_garbage():
            rounds = [[[] for _ in range(1000)] for _ in range(10)]
            del rounds[1:]
            assert gc.get_threshold() == (before and max(before, BETWEEN), 5, 7)
            assert not collected
        assert gc.get_threshold() == (before, 5, 7)
    finally:
        gc.set_threshold(*known)
        gc.callbacks.pop()


def test_what_somebody_else_left_out_stays_left_out() -> None:
    gc.freeze()
    with only_new_garbage():
        pass
    assert gc.get_freeze_count() > 1000


def test_what_python_leaves_out_itself_is_nobody_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with hundreds of such objects."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    before = len(gc.get_objects())
    with only_new_garbage():
        assert len(gc.get_objects()) < before / 10
    assert len(gc.get_objects()) > before / 2


def test_generate_collects_new_garbage_only(tmp_path: Path) -> None:
    llm = LLM(str(emoji_model(tmp_path)), max_num_seqs=2, dtype="float32", kv_blocks=40)
    before, seen = len(gc.get_objects()), []
    llm.generate(
        [[1, 2, 3], [4, 5]],
        SamplingParams(max_tokens=4, ignore_eos=True),
        on_progress=lambda done, total: seen.append(len(gc.get_objects())),
    )
    assert seen and max(seen) < before / 5
    assert not gc.get_freeze_count()


def test_what_is_measured_collects_new_garbage_only(tmp_path: Path) -> None:
    """As generating does, and serving: else a tenth of a second would be somebody's, by chance."""
    llm = LLM(str(emoji_model(tmp_path)), max_num_seqs=2, dtype="float32", kv_blocks=40)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    before, seen, step = len(gc.get_objects()), list[int](), llm.engine.step

    def look() -> list[Progress]:
        seen.append(len(gc.get_objects()))
        return step()

    llm.engine.step = look  # type: ignore[method-assign]
    run_pass(llm.engine, 2, PLAIN, Load([[1, 2, 3], [4, 5]], params))
    passes = len(seen)
    run_batch(llm, [[1, 2, 3], [4, 5]], params, "off")
    assert 0 < passes < len(seen) and max(seen) < before / 5
    assert not gc.get_freeze_count()
