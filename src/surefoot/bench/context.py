"""What a comparison was made of, beside its numbers: in a sentence, and everything as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from surefoot import __version__
from surefoot.bench.hardware import describe_hardware, name_hardware
from surefoot.bench.machine_load import MachineLoad
from surefoot.bench.measure import Measured, Settings
from surefoot.bench.report import to_json
from surefoot.engine.llm import LLM


def workload(llm: LLM, settings: Settings, results: Sequence[Measured]) -> str:
    """What was measured, how often, and on what."""
    backend = llm.engine.decoder.backend
    prompts = sum(len(item.prompts) for item in results)
    pairs = len(results[0].pairs)
    return (
        f"{llm.config.model}, {backend.name} backend, {str(backend.dtype).removeprefix('torch.')}; "
        f"{prompts} prompt{'s' * (prompts != 1)}, {settings.batch_size} at once, up to "
        f"{settings.params.max_tokens} output tokens; "
        f"{pairs} pair{'s' * (pairs != 1)} of runs each; {name_hardware(llm.config.device)}."
    )


def everything(
    llm: LLM, settings: Settings, results: Sequence[Measured], busyness: MachineLoad
) -> dict[str, Any]:
    """All that was measured, and on what; JSON-ready."""
    backend = llm.engine.decoder.backend
    return {
        "surefoot": __version__,
        "model": llm.config.model,
        "hardware": describe_hardware(llm.config.device),
        "machine_load": busyness.to_json(),
        "engine": {
            **asdict(llm.config),
            "backend": backend.name,
            "weights": llm.config.weights_on(backend.name),
            "dtype": str(backend.dtype).removeprefix("torch."),
            "proposers": list(llm.engine.proposer_names),
            "max_model_len": llm.engine.max_model_len,
        },
        "settings": asdict(settings),
        "memory": asdict(llm.engine.memory) if llm.engine.memory else None,
        **to_json(results),
    }
