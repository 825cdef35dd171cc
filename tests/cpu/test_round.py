"""Law 4: a round is one program; nothing in it reads a tensor on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_engines import folder
from harness import Job, Oracle, make_engine, run_jobs, tiny_decoder
from surefoot.request import SamplingParams
from surefoot.speculation import registry
from surefoot.speculation.proposer import Commits, Needs
from surefoot.speculation.scoring import PromptReads, PromptScores
from surefoot.speculation.size import Size
from surefoot.speculation.state import SlotState

# What makes the host wait for the device: reads of values, and shapes that depend on them.
HOST_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
    "aten::is_nonzero",
    "aten::equal",
    "aten::bincount",
}


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.seen.append(name)
        boolean_index = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )
        if name in HOST_READS or boolean_index:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def watched_rounds(params: SamplingParams, **options: Any) -> Watch:
    # Kernels would hide what the tensor operations do.
    engine = make_engine(
        tiny_decoder(),
        draft_policy="fixed",
        max_num_batched_tokens=16,
        max_num_seqs=4,
        **options,
    )
    watch = Watch()
    run = engine.rounds.run

    def watched(*args: Any) -> Any:
        with watch:
            return run(*args)

    engine.rounds.run = watched  # type: ignore[method-assign]
    run_jobs(engine, [Job((2, 3, 4) * 8, params), Job((5, 6, 5, 6, 5), params, arrival=2)])
    return watch


def test_no_host_read_inside_a_greedy_round() -> None:
    watch = watched_rounds(SamplingParams(temperature=0, max_tokens=12))
    assert len(watch.seen) > 500
    assert watch.reads == []


EVERY_OPTION = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={4: 1.0},
    min_tokens=5,
    stop_token_ids=[7, 8],
    logprobs=3,
    prompt_logprobs=2,
    max_tokens=12,
    seed=1,
)


def test_no_host_read_inside_a_round_with_every_option() -> None:
    assert watched_rounds(EVERY_OPTION).reads == []


@pytest.mark.parametrize("own", [{}, {"top_k": 3, "depth": 3}], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0, max_tokens=12), EVERY_OPTION], ids=["greedy", "every"]
)
def test_no_host_read_while_a_network_drafts(params: SamplingParams, own: dict[str, int]) -> None:
    watch = watched_rounds(
        params,
        proposers=("ngram", f"eagle3={folder('random')}"),
        proposer_options={"eagle3": own},
    )
    assert watch.reads == []


def test_the_watch_sees_host_reads() -> None:
    with Watch() as watch:
        values = torch.tensor([1.0, 0.0])
        bool(values[0])
        values[values > 0]
        values.nonzero()
    assert len(watch.reads) >= 3


# --- layers that proposers read -----------------------------------------------------------------


class Reader(Oracle):
    """Keeps the features that it is given."""

    layers: tuple[int, ...]

    def __init__(self, options: Any, state: SlotState) -> None:
        super().__init__(options, state)
        self.given: list[torch.Tensor] = []

    def needs(self) -> Needs:
        return replace(super().needs(), captured_layers=self.layers)

    def catch_up(self, commits: Commits) -> None:
        self.given.append(commits.features)


class Neighbours(Reader):
    name, layers = "neighbours", (1, 2)


class Ends(Reader):
    name, layers = "ends", (2, 0)


class Everything(Reader):
    name, layers = "everything", (0, 1, 2)


def test_proposers_read_the_layers_that_they_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, whether these are neighbours or not, and whatever others read."""
    monkeypatch.setattr(registry, "_PROPOSERS", dict(registry._PROPOSERS))
    kinds = (Neighbours, Ends, Everything)
    for kind in kinds:
        registry.register(kind)
    engine = make_engine(tiny_decoder(), proposers=tuple(k.name for k in kinds), max_num_seqs=2)
    assert engine.round.keeping_up.capture == (0, 1, 2)
    readers = [item for item in engine.proposers if isinstance(item, Reader)]
    for reader in readers:
        reader.given.clear()  # Those of measurements.
    run_jobs(engine, [Job((2, 3, 4), SamplingParams(temperature=0, max_tokens=6))])
    neighbours, ends, everything = (reader.given for reader in readers)
    hidden = engine.decoder.config.hidden_size
    assert len(neighbours) == len(ends) == len(everything) > 3
    for two, apart, whole in zip(neighbours, ends, everything, strict=True):
        low, middle, high = whole.split(hidden, dim=1)
        assert not torch.equal(low, middle) and not torch.equal(middle, high)
        assert torch.equal(two, torch.cat((middle, high), dim=1))
        assert torch.equal(apart, torch.cat((high, low), dim=1))


def drawn_text(apart: bool) -> list[int]:
    """``apart``: of rounds whose first part is the plainest one's, as where they are recorded."""
    engine = make_engine(tiny_decoder("native"), False)

    def run(size: Size, keys: int, reads: PromptReads | None) -> PromptScores:
        rows = engine.round.run_target(size.target, keys, reads)
        engine.round.go_on(size, rows, keys)
        return rows.prompt_scores

    if apart:
        engine.rounds.run = run  # type: ignore[method-assign]
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    [request] = run_jobs(engine, [Job((5, 9, 3), drawn)])
    return request.output


def test_likeliest_tokens_that_are_known_early_are_not_taken_for_drawn_ones() -> None:
    assert drawn_text(True) == drawn_text(False)
