"""The engine of a sweep: a model's weights or random ones, real or synthetic acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.bench import synthetic
from surefoot.bench.prompts import BenchPrompt
from surefoot.config import DEFAULT_MODEL, EngineConfig
from surefoot.engine.build import ProgressCallback, build_engine, choose_backend
from surefoot.engine.engine import Engine
from surefoot.engine.rehearsal import rehearsal
from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights
from surefoot.models.loading import load_tokenizer
from surefoot.models.loading.hf_config import read_hf_config
from surefoot.sampling.params import Features
from surefoot.speculation.replay import Override, ReplayRound, Size


@dataclass(frozen=True)
class Subject:
    """What is measured. ``dummy``: a folder with a config.json, or that file; None: the options'
    model. ``rates``: unconditional acceptance rates of drafts 1, 2, …; none: real acceptance."""

    options: Mapping[str, Any]
    dummy: Path | None = None
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        options = self.options
        if self.dummy is not None:
            if "model" in options:
                raise SurefootError("dummy_weights", "does not go with --model", "drop one of them")
            if options.get("weights") == "native":
                raise SurefootError("weights", "native blocks come from GGUF files only", "drop it")
        if self.rates:
            for name in ("proposers", "proposer_options"):
                if name in options and not self.drafter:
                    raise SurefootError(
                        name,
                        "does not go with --synthetic-acceptance, which drafts itself",
                        "drop one of them, or name one drafter with its path",
                    )
            if options.get("enforce_eager"):
                raise SurefootError(
                    "synthetic_acceptance", "needs recorded rounds", "drop --enforce-eager"
                )

    @property
    def drafter(self) -> bool:
        """Whether a drafter does all its work, however its drafts are then accepted."""
        proposers = tuple(self.options.get("proposers") or ())
        return len(proposers) == 1 and "=" in proposers[0]

    @property
    def on_gpu(self) -> bool:
        return str(self.options.get("device", "cpu")).startswith("cuda")


def sweep_config(subject: Subject, most: int, longest: int, drafts: int) -> EngineConfig:
    """The engine's configuration for up to ``most`` requests of ``longest`` tokens (unless the
    options say otherwise) with ``drafts`` drafts each (likewise), or more where a proposer is told
    to offer more."""
    own = subject.options.get("proposer_options", {}).values()
    told = [values["draft_tokens"] for values in own if "draft_tokens" in values]
    told = [count for count in told if isinstance(count, int)]
    options = {
        "max_num_seqs": most,
        "max_model_len": longest,
        "max_draft_tokens": max([drafts, *told]),
        "enable_prefix_caching": False,
        **subject.options,
    }
    if subject.rates and not subject.drafter:
        options["proposers"] = (synthetic.NAME,)
        options["proposer_options"] = {synthetic.NAME: {"draft_tokens": len(subject.rates)}}
    return EngineConfig.from_dict(options)


def build_subject(
    subject: Subject, config: EngineConfig, progress: ProgressCallback | None = None
) -> Engine:
    """Load or draw the weights. Synthetic acceptance is part of the rounds from the first one
    measured; where none are recorded it runs in the same rounds, called one after the other."""
    override = _acceptance(subject.rates) if subject.rates else None
    ahead = True if subject.rates and not subject.on_gpu else None
    if subject.rates:
        synthetic.register()
    if subject.dummy is None:
        engine = build_engine(config, progress, ahead, override)[0]
    else:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        backend = choose_backend(config)
        shape = read_dummy_config(subject.dummy)
        weights = DummyWeights(shape, backend.device, backend.dtype)
        engine = Engine(
            Decoder(shape, weights, backend, config.max_model_len), config, ahead, override
        )
    if ahead:
        _measure_called_rounds(engine, config.max_model_len or 1024)
    return engine


def _acceptance(rates: Sequence[float]) -> Callable[[ReplayRound], Override]:
    return lambda replay: synthetic.accept(replay, rates)


def _measure_called_rounds(engine: Engine, context: int) -> None:
    """Without a GPU, rounds that run ahead have guessed costs: time each size, after one that does
    not count. The engine must be idle."""
    pipeline = engine.pipeline
    assert pipeline is not None
    graphs, replay = pipeline.graphs, pipeline.replay
    proposers = tuple(range(len(engine.proposers)))
    with rehearsal(replay, engine.kv_blocks, context) as seat:
        for spans in graphs.spans:
            for rows, steps in graphs.variants(spans):
                times = []
                for _ in range(3):
                    seat(spans)
                    begun = time.perf_counter()
                    replay(Size(spans, rows, Features(), proposers, steps))
                    times.append(time.perf_counter() - begun)
                graphs.costs[spans, rows, steps] = min(times)


def tokenize(options: Mapping[str, Any], prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """The prompts as token ids, before the engine stands."""
    _, tokenizer = load_tokenizer(options.get("model", DEFAULT_MODEL))
    return [
        tokenizer.encode(prompt.text, add_special_tokens=True)
        if prompt.text is not None
        else tokenizer.encode(
            tokenizer.render_chat(list(prompt.messages)), add_special_tokens=False
        )
        for prompt in prompts
    ]


def read_dummy_config(path: Path) -> ModelConfig:
    """The config in a folder, or a config.json itself."""
    folder = path.parent if path.is_file() and path.name == "config.json" else path
    try:
        return read_hf_config(folder)
    except SurefootError as error:
        raise SurefootError("dummy_weights", error.problem, error.fix) from None


def kind_of_rounds(engine: Engine) -> str:
    """How decoding rounds run."""
    if engine.pipeline is None:
        return "planned by the host"
    on_gpu = engine.decoder.backend.device.type == "cuda"
    return "recorded" if on_gpu else "run ahead, not recorded"
