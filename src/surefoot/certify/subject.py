"""What is certified: a target on a backend, with proposers, and engines of any shape around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from surefoot.certify.probes import (
    PROBES,
    GarbageProbe,
    MixedProbe,
    Others,
    ProbeOptions,
    RightProbe,
    RunnerUpProbe,
    TreeProbe,
)
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.models.decoder import Decoder
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.sampling.grammar import Grammars
from surefoot.speculation.loading import choose_proposers, lower_drafts
from surefoot.speculation.proposer import Proposer

RIGHT, MIXED, GARBAGE, RUNNER_UP, TREE = (
    probe.name for probe in (RightProbe, MixedProbe, GarbageProbe, RunnerUpProbe, TreeProbe)
)
TREES_KEY = "trees"
SMALL_BLOCK, LARGE_BLOCK = 4, 16
Sabotage = Callable[[Engine, bool], None]
"""(engine, whether it is the speculative one): breaks the engine in place."""


def check(config: EngineConfig) -> None:
    """Raise SurefootError for what cannot be certified; needs no model."""
    if config.max_draft_tokens == 0:
        raise SurefootError("max_draft_tokens", "is 0: nothing would be drafted")
    if not choose_proposers(config)[0]:
        raise SurefootError(
            "proposers", "are none that draft for any text", "name at least one to certify"
        )


class ProbedEngine(Engine):
    """An engine that also loads the probes, which the registry does not know."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        probes: ProbeOptions,
        ahead: bool,
    ) -> None:
        self._probes = probes
        super().__init__(decoder, config, ahead)

    def _load_proposers(self, chosen: Sequence[tuple[type[Proposer], Any]]) -> list[Proposer]:
        loaded = super()._load_proposers(chosen)
        if self.state.max_drafts:
            kinds = list(PROBES)
            if any(proposer.needs().trees for proposer in loaded):
                kinds.append(TreeProbe)
            loaded += [probe(self._probes, self.state) for probe in kinds]
        return loaded


@dataclass(frozen=True)
class Subject:
    """``config`` names device, dtype, proposers and their options, and the most drafts; the
    certificate chooses all sizes itself. ``prompts`` are token ids."""

    decoder: Decoder
    config: EngineConfig
    prompts: tuple[tuple[int, ...], ...]
    tokenizer: Tokenizer | None = None
    sabotage: Sabotage | None = None
    cache: dict[Any, Any] = field(default_factory=dict)
    """Plain texts by job and what came second in them, shared by the sections and the self-test."""
    grammars: Grammars | None = None
    """What structured output is compiled by; of the tokenizer, if there is one."""
    recorded: bool | None = None
    """Whether requests with drafts go through rounds of recorded sizes, launched ahead (without a
    GPU these run when they are launched), or through rounds called with just the rows that they
    need. None: as engines do with this configuration."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise SurefootError("prompts", "are none", "give at least one")
        check(self.config)
        if self.grammars is None and self.tokenizer is not None:
            model = self.decoder.config
            grammars = Grammars(self.tokenizer, model.vocab_size, model.eos_token_ids)
            object.__setattr__(self, "grammars", grammars)

        if self.recorded is None:
            on_gpu = self.decoder.backend.device.type == "cuda"
            object.__setattr__(self, "recorded", on_gpu and not self.config.enforce_eager)

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of the proposers under test, but for ``hosts``."""
        return tuple(kind.name for kind, _ in choose_proposers(self.config)[0])

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of those that draft for texts with a grammar alone."""
        return tuple(kind.name for kind, _ in choose_proposers(self.config)[1])

    @property
    def probes(self) -> tuple[str, ...]:
        """Names of the probes that stand beside them."""
        return (*(probe.name for probe in PROBES), *((TREE,) if self.trees else ()))

    @property
    def small_block(self) -> int:
        """Keys of a block in engines that are to have many blocks: few, but no fewer than give the
        text of larger blocks."""
        return max(SMALL_BLOCK, self.decoder.backend.smallest_block(self.decoder.shape))

    @cached_property
    def max_drafts(self) -> int:
        """Of a request, in one round."""
        return choose_proposers(self.config)[2]

    @property
    def trees(self) -> bool:
        """Whether some proposer under test offers trees, whose rows find their keys elsewhere."""
        if TREES_KEY not in self.cache:
            controller = self.engine(64, 1, recorded=False).controller
            self.cache[TREES_KEY] = any(controller.trees)
        return self.cache[TREES_KEY]

    def broken(self, sabotage: Sabotage, breaks_plain: bool) -> Subject:
        """The same set-up with a known defect."""
        cache = {} if breaks_plain else self.cache
        return replace(self, sabotage=sabotage, cache=cache)

    def engine(
        self,
        longest: int,
        batch: int,
        *,
        texts: Sequence[tuple[int, ...]] = (),
        others: Sequence[Others] = (),
        recorded: bool | None = None,
        **options: Any,
    ) -> Engine:
        """A fresh engine for ``batch`` texts of at most ``longest`` tokens. ``options`` override
        the configuration; ``max_draft_tokens=0`` makes it plain. ``texts`` and ``others`` (of each
        of them, or none) are what the probes know. ``recorded``: other than the subject's, or for a
        plain one, whose rounds are called by default."""
        drafts = options.get("max_draft_tokens", self.max_drafts)
        block_size = options.get("block_size", self.config.block_size)
        values: dict[str, Any] = {
            "max_model_len": min(longest, self.decoder.config.max_positions),
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(256, batch),
            "kv_blocks": batch * (-(-(longest + drafts + 1) // block_size) + 1),
            "kv_cache_memory": None,
            "enable_prefix_caching": False,
            "draft_policy": "fixed",
            # Sizes of rounds are recorded when they are met, and none is timed.
            "calibration_seconds": 0.0,
            "proposers": (*self.proposers, *self.hosts) if drafts else (),
            "proposer_options": lower_drafts(self.config.proposer_options, drafts)
            if drafts
            else {},
            "max_draft_tokens": drafts,
            **options,
        }
        if recorded is None:
            recorded = bool(self.recorded and drafts)
        probes = ProbeOptions(tuple(texts), others=tuple(others))
        engine = ProbedEngine(self.decoder, replace(self.config, **values), probes, recorded)
        engine.grammars = self.grammars
        if self.sabotage is not None:
            self.sabotage(engine, drafts > 0)
        return engine
