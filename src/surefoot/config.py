"""Frozen configuration of an engine; unknown names are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from surefoot.errors import SurefootError

DEFAULT_MODEL = "smollm2-135m"
MOST_DRAFTS = 63
"""Of a request, in one round: bits of a row's mask, less the span's first row."""
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes an engine. Sizes are counts of tokens, rows or bytes as named."""

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    """Of dense weights, activations and KV: ``float32``, ``bfloat16``, or ``auto``, bfloat16 where
    it is fast on this device."""
    weights: str = "auto"
    """``native`` keeps GGUF blocks packed and multiplies them by activations rounded to 8 bits,
    ``dense`` converts them to ``dtype``; ``auto`` takes native on the compiled kernels, unless
    ``dtype`` asks for float32."""
    backend: str = "auto"
    """``native`` (compiled CPU kernels), ``triton`` (NVIDIA GPUs), ``torch`` (reference), or
    ``auto``."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = cast(int, None)
    """Requests that run at once; None: 32 on a CPU, 128 on a GPU."""
    max_num_batched_tokens: int = cast(int, None)
    """Rows of a round before drafts, so the longest prompt chunk; None: 256 on a CPU, 8192 on a
    GPU, or ``max_num_seqs`` if that is more."""
    block_size: int = 16
    """Positions of a block of KV. With bfloat16 on a Hopper GPU a power of two from 8 on: smaller
    ones would need kernels that sum in another order, and so give other texts."""
    kv_cache_memory: int | None = None
    """Bytes for the KV pool; None: 1 GiB, or what ``max_num_seqs`` full contexts need if less."""
    kv_blocks: int | None = None
    """Size of the pool in blocks instead of bytes."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, rounds and KV may take together."""
    enforce_eager: bool = False
    """On a GPU: no recorded rounds (CUDA graphs)."""
    enable_prefix_caching: bool = True
    proposers: tuple[str, ...] | None = None
    """Names of the proposers to load; None: the registry's default, (): plain decoding only.
    ``name=path`` gives one its option ``path``, where its network is."""
    proposer_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options by proposer, for example ``{"ngram": {"max_ngram": 4}}``."""
    max_draft_tokens: int | None = None
    """Most drafts of a request that a round verifies; None: what the loaded proposers offer."""
    draft_policy: str = "auto"
    """``auto``: the controller verifies what pays; ``fixed``: every offered draft, up to the
    limits (for measurements and tests)."""
    calibration_seconds: float = 1.5
    """Upper bound of the time spent at start-up to measure a round's cost by its rows."""
    generation_config: str = "auto"
    """``auto``: where no sampling parameters are given, those that the model recommends in its
    generation_config.json or GGUF file; ``none``: those of ``SamplingParams()``."""

    def __post_init__(self) -> None:
        self._take_paths()
        self._fill_in()
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("weights", self.weights, ("auto", "native", "dense"))
        _one_of("backend", self.backend, ("auto", "native", "torch", "triton"))
        _one_of("draft_policy", self.draft_policy, ("auto", "fixed"))
        _one_of("generation_config", self.generation_config, ("auto", "none"))
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 1),
        ):
            _at_least(name, getattr(self, name), low)
        for name in ("threads", "max_model_len", "kv_cache_memory", "kv_blocks"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_draft_tokens is not None:
            self._check_drafts(self.max_draft_tokens)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SurefootError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is below max_num_seqs = {self.max_num_seqs}",
                "every running request needs a row in each round",
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise SurefootError(
                "gpu_memory_utilization", f"{share!r} is out of range", "use a share, 0 < x <= 1"
            )
        for option, given in (
            ("enforce_eager", self.enforce_eager),
            ("gpu_memory_utilization", share != 0.9),
        ):
            if given and not self.device.startswith("cuda"):
                raise SurefootError(option, "is for NVIDIA GPUs only", "add --device cuda")
        if self.weights == "native" and self.dtype == "float32":
            raise SurefootError(
                "dtype",
                "native weights are multiplied by activations rounded to 8 bits, not by float32",
                "use --weights dense, or another --dtype",
            )
        if self.weights == "native" and self.backend == "torch":
            raise SurefootError(
                "weights", "native blocks need the native backend", "drop backend=torch"
            )

    def weights_on(self, backend: str) -> str:
        """``native`` or ``dense``: what ``weights`` comes to on the backend of this name."""
        if self.weights != "auto":
            return self.weights
        return "native" if backend == "native" and self.dtype != "float32" else "dense"

    def _check_drafts(self, most: int) -> None:
        _at_least("max_draft_tokens", most, 0)
        if most > MOST_DRAFTS:
            raise SurefootError(
                "max_draft_tokens", f"is above {MOST_DRAFTS}", "a span holds at most 64 rows"
            )
        named = dict.fromkeys((*(self.proposers or ()), *self.proposer_options))
        if most == 0 and named:
            raise SurefootError(
                "max_draft_tokens",
                f"is 0, so {' and '.join(named)} cannot draft",
                "drop one of them",
            )

    def _fill_in(self) -> None:
        """Defaults that depend on the device."""
        seqs, tokens = (128, 8192) if self.device.startswith("cuda") else (32, 256)
        if self.max_num_seqs is None:
            object.__setattr__(self, "max_num_seqs", seqs)
        if self.max_num_batched_tokens is None:
            most = self.max_num_seqs
            tokens = max(tokens, most) if isinstance(most, int) else tokens
            object.__setattr__(self, "max_num_batched_tokens", tokens)

    def _take_paths(self) -> None:
        """Split ``name=path`` among the proposers into name and option. Who is named once more is
        the same proposer."""
        if self.proposers is None:
            return
        named = isinstance(self.proposers, Collection) and not isinstance(self.proposers, str)
        if not named or not all(isinstance(entry, str) for entry in self.proposers):
            problem = f"{self.proposers!r} is no list of names"
            raise SurefootError("proposers", problem, 'use one like ["NAME", "NAME=PATH"]')
        options = {name: dict(values) for name, values in self.proposer_options.items()}
        names = []
        for entry in self.proposers:
            name, equals, path = entry.partition("=")
            names.append(name)
            if equals and options.setdefault(name, {}).setdefault("path", path) != path:
                raise SurefootError("proposers", f"{name} is given two paths", "drop one of them")
        object.__setattr__(self, "proposers", tuple(dict.fromkeys(names)))
        object.__setattr__(self, "proposer_options", options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from named values; unknown names are an error that lists the known ones."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise SurefootError(name, "is no engine option", f"known: {', '.join(known)}")
        return cls(**values)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SurefootError(name, f"{value!r} is unknown", f"use one of {', '.join(allowed)}")


def _at_least(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise SurefootError(name, f"{value!r} is out of range", f"use a whole number from {low}")
