"""Groups of options that verbs share (see ``verb``). Nothing is set unless it was given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from surefoot.cli.drafters import with_drafters
from surefoot.cli.values import read_logit_bias, read_proposer_options, read_size
from surefoot.config import DEFAULT_MODEL, EngineConfig
from surefoot.errors import SurefootError
from surefoot.request import SamplingParams


def option(*names: str, panel: str, **settings: Any) -> Any:
    """An option among those of ``panel``; defaults are shown where ``show_default`` says so."""
    settings = {"show_default": False, **settings}
    return typer.Option(*names, rich_help_panel=panel, **settings)


def _engine(*names: str, **settings: Any) -> Any:
    return option(*names, panel="Engine", **settings)


def _sampling(*names: str, **settings: Any) -> Any:
    return option(*names, panel="Sampling", **settings)


@with_drafters
def engine_options(
    model: Annotated[
        str | None,
        _engine(
            "--model",
            "-m",
            help="Folder with safetensors, GGUF file, hub name, or a name from `surefoot models "
            f"list`. (default: {DEFAULT_MODEL})",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        _engine(
            help="auto, float32 or bfloat16, of dense weights, activations and KV. float32 "
            "computes in float32 throughout, with dense weights. (default: auto)"
        ),
    ] = None,
    weights: Annotated[
        str | None,
        _engine(
            help="auto, native (GGUF blocks stay packed, and activations are rounded to 8 bits: "
            "fast, but not what the model says in float32) or dense. (default: auto, native on a "
            "CPU but for --dtype float32)"
        ),
    ] = None,
    backend: Annotated[
        str | None,
        _engine(help="auto, native (compiled, CPU), triton (NVIDIA) or torch. (default: auto)"),
    ] = None,
    device: Annotated[str | None, _engine(help="cpu, cuda or cuda:N. (default: cpu)")] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _engine(help="Share of the GPU's memory to take, KV included. (default: 0.9)"),
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        _engine("--enforce-eager", help="On a GPU: record no rounds as CUDA graphs."),
    ] = None,
    threads: Annotated[int | None, _engine(help="Threads. (default: one per core)")] = None,
    max_model_len: Annotated[
        int | None, _engine(help="Longest context in tokens. (default: the model's)")
    ] = None,
    max_num_seqs: Annotated[
        int | None, _engine(help="Requests that run at once. (default: 32; 128 on a GPU)")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        _engine(help="Rows of a round, prompts included. (default: 256; 8192 on a GPU)"),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        _engine(metavar="SIZE", help="KV cache: bytes, or a number with MiB or GiB."),
    ] = None,
    proposer: Annotated[
        list[str] | None,
        _engine(metavar="NAME", help="Load this proposer of drafts only (repeatable)."),
    ] = None,
    proposer_option: Annotated[
        list[str] | None,
        _engine(metavar="NAME.OPTION=VALUE", help="Set an option of a proposer (repeatable)."),
    ] = None,
    draft_policy: Annotated[
        str | None,
        _engine(help="auto (verify what pays) or fixed (every draft). (default: auto)"),
    ] = None,
    max_draft_tokens: Annotated[
        int | None,
        _engine(help="Most drafts of a request verified in one round. (default: the proposers')"),
    ] = None,
) -> dict[str, Any]:
    """Keyword arguments for ``LLM``, checked as far as that goes without loading anything."""
    options: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "backend": backend,
        "device": device,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enforce_eager": enforce_eager,
        "threads": threads,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_memory": None if kv_cache_memory is None else read_size(kv_cache_memory),
        "proposers": tuple(proposer) if proposer else None,
        "proposer_options": read_proposer_options(proposer_option) if proposer_option else None,
        "draft_policy": draft_policy,
        "max_draft_tokens": max_draft_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    EngineConfig.from_dict(given)
    return given


def sampling_options(
    max_tokens: Annotated[int | None, _sampling(help="Most tokens to generate.")] = None,
    temperature: Annotated[
        float | None,
        _sampling(
            help="0 takes the most likely token each time. (default: 0; in chat the model's, if it "
            "recommends one)"
        ),
    ] = None,
    top_k: Annotated[int | None, _sampling(help="Sample among the k likeliest.")] = None,
    top_p: Annotated[
        float | None, _sampling(help="Sample among the likeliest that make up this share.")
    ] = None,
    min_p: Annotated[
        float | None, _sampling(help="Sample what has this share of the likeliest's chance.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling(help="Above 1: tokens already seen become less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, _sampling(help="Taken off the score of generated tokens, once.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, _sampling(help="Taken off the score of generated tokens, each time.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        _sampling(metavar="ID=BIAS", help="Add to the score of a token id (repeatable)."),
    ] = None,
    seed: Annotated[int | None, _sampling(help="Makes sampled text repeatable.")] = None,
    stop: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="End before this text (repeatable).")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, _sampling(metavar="ID", help="End at this token id (repeatable).")
    ] = None,
    min_tokens: Annotated[int | None, _sampling(help="Do not end before.")] = None,
    ignore_eos: Annotated[
        bool, _sampling("--ignore-eos", help="Go on after the model's end token.")
    ] = False,
) -> dict[str, Any]:
    """Fields of ``SamplingParams``, those that were given."""
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": read_logit_bias(logit_bias) if logit_bias else None,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
        "stop_token_ids": tuple(stop_token_id) if stop_token_id else None,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
    }
    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams.from_dict(given)
    return given


def with_temperature(sampling: dict[str, Any], default: float = 0.0) -> dict[str, Any]:
    """The fields in ``sampling``, a temperature among them. At 0, filters are a mistake."""
    sampling = {"temperature": default, **sampling}
    for name in ("top_k", "top_p", "min_p"):
        if sampling["temperature"] == 0 and name in sampling:
            raise SurefootError(name, "does nothing at temperature 0", "give --temperature too")
    return sampling


def generation_config_option(
    generation_config: Annotated[
        str,
        _sampling(
            metavar="auto|none",
            help="auto: what is not given is as the model recommends in its generation_config.json "
            "or GGUF file; none: its recommendations are not used. (default: auto)",
        ),
    ] = "auto",
) -> str:
    return generation_config


def speculation_option(
    speculation: Annotated[
        str,
        option(
            panel="Speculation",
            metavar="METHOD",
            help="auto, off, or the name of a proposer; the text is the same. (default: auto)",
        ),
    ] = "auto",
) -> str:
    return speculation


def refuse_idle_speculation(speculation: str, engine: dict[str, Any]) -> None:
    """With speculation off, options that only speculation reads are a mistake."""
    for name in ("proposers", "proposer_options", "draft_policy", "max_draft_tokens"):
        if speculation == "off" and name in engine:
            raise SurefootError(name, "does nothing with --speculation off", "drop one of them")
