"""The engine of a benchmark: a model's weights or random ones, real or synthetic acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.bench import synthetic
from surefoot.bench.hardware import describe_hardware
from surefoot.bench.prompts import BenchPrompt
from surefoot.config import DEFAULT_MODEL, EngineConfig
from surefoot.engine.build import ProgressCallback, build_engine, choose_backend
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights
from surefoot.models.loading import load_tokenizer
from surefoot.models.loading.hf_config import read_hf_config


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
                        "drop one of them, or name a drafter with its path",
                    )

    @property
    def drafter(self) -> bool:
        """Whether a drafter does all its work, however its drafts are then accepted."""
        return any("=" in name for name in self.options.get("proposers") or ())


def subject_config(subject: Subject, most: int, longest: int, drafts: int) -> EngineConfig:
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
        "generation_config": "none",
        **subject.options,
    }
    if subject.rates and not subject.drafter:
        options["proposers"] = (synthetic.NAME,)
        options["proposer_options"] = {synthetic.NAME: {"draft_tokens": len(subject.rates)}}
    return EngineConfig.from_dict(options)


def build_subject(
    subject: Subject, config: EngineConfig, progress: ProgressCallback | None = None
) -> Engine:
    """Load or draw the weights. Synthetic acceptance is part of the rounds from the first one that
    is measured."""
    prepare = synthetic.accept_at(subject.rates) if subject.rates else None
    if subject.rates:
        synthetic.register()
    if subject.dummy is None:
        return build_engine(config, progress, prepare)[0]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = choose_backend(config)
    shape = read_dummy_config(subject.dummy)
    weights = DummyWeights(shape, backend.device, backend.dtype)
    decoder = Decoder(shape, weights, backend, config.max_model_len)
    return Engine(decoder, config, prepare=prepare)


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
    """How rounds run."""
    return "recorded" if engine.rounds.recorded else "called"


def title(engine: Engine, subject: Subject) -> str:
    """Model, backend and dtype."""
    backend = engine.decoder.backend
    model = engine.config.model if subject.dummy is None else f"random weights of {subject.dummy}"
    return f"{model}, {backend.name} backend, {str(backend.dtype).removeprefix('torch.')}"


def describe_subject(engine: Engine, subject: Subject) -> dict[str, Any]:
    """The model, the engine and the machine; JSON-ready."""
    config, backend = engine.config, engine.decoder.backend
    return {
        "model": config.model if subject.dummy is None else None,
        "dummy_weights": None if subject.dummy is None else str(subject.dummy),
        "synthetic_acceptance": list(subject.rates),
        "hardware": describe_hardware(config.device),
        "engine": {
            **asdict(config),
            "backend": backend.name,
            "dtype": str(backend.dtype).removeprefix("torch."),
            "proposers": list(engine.proposer_names),
            "max_model_len": engine.max_model_len,
            "kv_tokens": engine.kv_tokens,
            "deterministic": engine.deterministic,
            "rounds": kind_of_rounds(engine),
        },
        "shape": asdict(engine.decoder.config),
        "memory": asdict(engine.memory) if engine.memory else None,
    }
