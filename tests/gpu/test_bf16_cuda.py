"""A whole engine as users run it on a GPU: bf16, recorded rounds, drafts in every round. One tiny
model, and one engine for all tests that can share it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from safetensors.torch import load_file

from surefoot import LLM, SamplingParams, SurefootError
from surefoot.engine.output import CompletionOutput
from surefoot.sampling.grammar import missing_package
from surefoot.structured import StructuredOutputsParams
from tiny_models import tiny_config, tiny_gguf, tiny_hf_model

pytestmark = pytest.mark.gpu
ON_DEVICE = False
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "max_model_len": 128,
    "draft_policy": "fixed",
    "max_draft_tokens": 4,
    "calibration_seconds": 0.0,
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7], [40, 41] * 9, list(range(30, 70))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    llm = LLM(str(model), **OPTIONS)
    yield llm
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.capacity
    assert llm.engine.stats.replays == llm.engine.stats.rounds > 100
    llm.engine.check_integrity()


def params(llm: LLM) -> list[SamplingParams]:
    """One for each prompt. The bias leaves few tokens, which repeat themselves."""
    few = dict.fromkeys(llm.tokenizer.encode("ab"), 60.0)
    usual = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3, seed=5)
    return [
        usual,
        replace(usual, temperature=0.8, top_p=0.9),
        replace(usual, temperature=1.0, logit_bias=few),
        replace(usual, repetition_penalty=1.3, logit_bias=few),
    ]


def alone(
    llm: LLM, prompt: list[int], wanted: SamplingParams, speculation: str = "off"
) -> CompletionOutput:
    [answer] = llm.generate(prompt, wanted, speculation=speculation)
    return answer.outputs[0]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[CompletionOutput]:
    """Each prompt by itself, without drafts."""
    return [alone(llm, *pair) for pair in zip(PROMPTS, params(llm), strict=True)]


def needs_exact_bits(llm: LLM) -> None:
    if not llm.engine.deterministic:
        pytest.skip("bf16 texts are the same to the bit on Hopper GPUs only")


def test_texts_with_drafts_and_company_are_those_of_plain_decoding_alone(
    llm: LLM, plain: list[CompletionOutput]
) -> None:
    """And so is every bit of their logprobs."""
    needs_exact_bits(llm)
    answers = llm.generate(PROMPTS, params(llm))
    for one, answer in zip(plain, answers, strict=True):
        got = answer.outputs[0]
        assert got.token_ids == one.token_ids and got.text == one.text
        assert got.logprobs == one.logprobs
        assert got.finish_reason == one.finish_reason == "length"
    stats = [answer.outputs[0].speculation for answer in answers]
    assert sum(each.verified for each in stats) > sum(each.accepted for each in stats) > 10


def test_logprobs_are_of_the_sampled_token_and_of_the_likeliest(
    llm: LLM, plain: list[CompletionOutput]
) -> None:
    for at, (output, prompt) in enumerate(zip(plain, PROMPTS, strict=True)):
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 40
        for token, score in zip(output.token_ids, output.logprobs, strict=True):
            values = [value for _, value in score.top]
            assert score.token_id == token and values == sorted(values, reverse=True)
            assert len(values) == 3 and score.rank >= 1 and values[0] <= 0.0
            if score.rank <= 3:
                assert score.logprob == values[score.rank - 1]
            if at == 0:
                assert score.rank == 1 and score.top[0][1] == score.logprob
        wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
        [answer] = llm.generate(prompt, wanted)
        first, *scores = answer.prompt_logprobs or ()
        assert first is None and [score.token_id for score in scores if score] == prompt[1:]


def test_a_stop_string_ends_text_and_stream(llm: LLM, plain: list[CompletionOutput]) -> None:
    wanted, whole = params(llm)[2], plain[2]
    stop = whole.text[5:8]
    cut = whole.text[: whole.text.find(stop)]
    stopping = replace(wanted, stop=stop)
    for speculation in ("off", "auto"):
        got = alone(llm, PROMPTS[2], stopping, speculation)
        assert (got.text, got.finish_reason, got.stop_reason) == (cut, "stop", stop)
        chunks = list(llm.stream(PROMPTS[2], stopping, speculation=speculation))
        assert "".join(chunk.text for chunk in chunks) == cut
        assert chunks[-1].finish_reason == "stop"


def test_structured_output_beside_free_text(llm: LLM, plain: list[CompletionOutput]) -> None:
    if (problem := missing_package()) is not None:
        pytest.skip(problem)
    pattern = "(ab|ba){3,9}c"
    free = params(llm)[1]
    bound = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60,
        structured_outputs=StructuredOutputsParams(regex=pattern),
    )  # fmt: skip
    want = alone(llm, PROMPTS[2], bound)
    first, second = llm.generate([PROMPTS[2], PROMPTS[1]], [bound, free])
    for got in (want, first.outputs[0]):
        assert re.fullmatch(pattern, got.text) and got.finish_reason == "stop"
    if llm.engine.deterministic:
        assert first.outputs[0].token_ids == want.token_ids
        assert second.outputs[0].token_ids == plain[1].token_ids


def test_the_memory_plan_adds_up(llm: LLM, model: Path) -> None:
    engine, plan = llm.engine, llm.engine.memory
    assert plan is not None
    parts = plan.bytes_by_part()
    assert all(size >= 0 for size in parts.values()) and plan.weights > 0 < plan.rounds
    assert sum(parts.values()) <= 2 * parts["total"], "all but the total, which is one of them"
    config, shape = engine.decoder.config, engine.decoder.shape
    per_block = engine.decoder.backend.kv_bytes_per_block(engine.config.block_size, shape)
    assert plan.kv == engine.kv_blocks * per_block * config.layers
    assert plan.kv_tokens == engine.kv_tokens
    assert plan.full_contexts == 4 * 128 <= plan.kv_tokens
    with pytest.raises(SurefootError, match="gpu_memory_utilization"):
        LLM(str(model), **{**OPTIONS, "gpu_memory_utilization": 1e-4})


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file(
    kind: str,
    llm: LLM,
    plain: list[CompletionOutput],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts with drafts and company are plain ones; of the same numbers they are the folder's."""
    needs_exact_bits(llm)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    config = tiny_config("llama", vocab_size=288)
    weights = load_file(model / "model.safetensors")
    path = tiny_gguf(tmp_path / "model.gguf", config, weights, kind=kind)
    own = LLM(str(path), **OPTIONS, enforce_eager=True)
    wanted = params(llm)
    want = plain
    if kind != "F32":
        want = [alone(own, *pair) for pair in zip(PROMPTS, wanted, strict=True)]
    for one, answer in zip(want, own.generate(PROMPTS, wanted), strict=True):
        assert answer.outputs[0].token_ids == one.token_ids
    assert own.engine.stats.draft_rows > 0


def test_a_server(llm: LLM, plain: list[CompletionOutput], model: Path) -> None:
    """In processes of its own, on a GPU that others use as well."""
    pytest.importorskip("fastapi")
    harness = pytest.importorskip("server_harness")
    options = {**OPTIONS, "backend": "auto"}
    del options["calibration_seconds"]
    wanted = params(llm)[2]
    body = {"prompt": PROMPTS[2], "max_tokens": 40, "temperature": 1, "seed": 5, "ignore_eos": True}
    body["logit_bias"] = {str(token): bias for token, bias in (wanted.logit_bias or {}).items()}
    with harness.running_server(model, **options) as server:
        tokens = server.complete(**body, return_token_ids=True)["choices"][0]["token_ids"]
        assert len(tokens) == 40
        if llm.engine.deterministic:
            assert tokens == plain[2].token_ids
        assert server.metric("surefoot_verified_tokens_total") > 0
        server.wait_idle()
        assert server.stop() == 0
