"""The sampling settings that a checkpoint recommends: generation_config.json of a Hugging Face
folder, or the ``general.sampling`` keys of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.json_reader import JsonReader
from surefoot.request import SamplingParams

FILE = "generation_config.json"
# Fields of SamplingParams -> the keys of generation_config.json (those that vLLM reads) ...
HF_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
# ... and of GGUF files; llama.cpp's converter copies them from generation_config.json.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
FILTERS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True)
class SamplingDefaults:
    """``values``: fields of ``SamplingParams`` for requests that do not set them; {} where the
    checkpoint recommends nothing. ``source`` names the file for people."""

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value:.10g}" for name, value in self.values.items())
        return f"sampling defaults from {self.source}: {settings}"


def read_hf_sampling(folder: Path) -> SamplingDefaults:
    """What generation_config.json recommends; without the file nothing.

    ``do_sample`` false asks for greedy text, so that temperature and filters do not count.
    ``do_sample`` true, or a filter, without a temperature means temperature 1, as in transformers.
    Raises SurefootError naming file and key for a value of the wrong type or out of range.
    """
    path = folder / FILE
    if not path.is_file():
        return SamplingDefaults()
    data = JsonReader.open(path).data

    def wrong(key: str, expected: str) -> SurefootError:
        return _wrong(f"{path} has {key} = {json.dumps(data[key])[:80]}", expected)

    sampled = data.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise wrong("do_sample", "expected true or false")
    values = _values(data, HF_KEYS, wrong)
    if sampled is False:
        idle = ("temperature", *FILTERS)
        values = {"temperature": 0.0} | {k: v for k, v in values.items() if k not in idle}
    elif sampled or any(name in values for name in FILTERS):
        values = {"temperature": 1.0, **values}
    return SamplingDefaults(values, FILE)


def read_gguf_sampling(file: GgufFile) -> SamplingDefaults:
    """What a GGUF file's metadata recommend; errors as in ``read_hf_sampling``."""

    def wrong(key: str, expected: str) -> SurefootError:
        return _wrong(f"{file.path} has {key} = {file.metadata[key]!r}", expected)

    return SamplingDefaults(_values(file.metadata, GGUF_KEYS, wrong), file.path.name)


def _values(
    data: Mapping[str, Any], keys: Mapping[str, str], wrong: Callable[[str, str], SurefootError]
) -> dict[str, Any]:
    """The fields that ``data`` gives, each checked as a request's would be."""
    values = {name: data[key] for name, key in keys.items() if data.get(key) is not None}
    for name, value in values.items():
        try:
            SamplingParams(**{name: value})
        except SurefootError as error:
            raise wrong(keys[name], error.fix) from None
    return values


def _wrong(problem: str, expected: str) -> SurefootError:
    return SurefootError(
        "generation_config",
        f"{problem}, {expected}",
        "correct it, or do without the model's sampling defaults: --generation-config none (in "
        'Python generation_config="none")',
    )
