"""The Python surface: text in, text out, and what bad input says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot import LLM, SamplingParams, SurefootError
from surefoot.engine.output import TextStream
from surefoot.request import FinishReason, Request, SpeculationParams
from tiny_models import tiny_hf_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_hf_model("llama", tmp_path_factory.mktemp("model"))
    model = LLM(
        str(path),
        dtype="float32",
        kv_blocks=120,
        block_size=4,
        max_num_seqs=8,
        calibration_seconds=0.05,
    )
    yield model
    assert model.engine.kv.pool.num_free == model.engine.kv.pool.capacity
    model.engine.check_integrity()


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LOOP = "the cat sat on the mat and the cat sat on the mat and the cat"


def test_generate_takes_text_ids_and_dicts_alike(llm: LLM) -> None:
    ids = llm.tokenizer.encode(LOOP)
    texts = [
        llm.generate(prompt, GREEDY)[0].outputs[0].text
        for prompt in (LOOP, ids, {"prompt": LOOP}, {"prompt_token_ids": ids})
    ]
    assert len(set(texts)) == 1 and texts[0]


def test_a_batch_keeps_its_order_and_gives_each_its_own_parameters(llm: LLM) -> None:
    prompts = ["the cat", "dog ate", "hat on"]
    params = [SamplingParams(temperature=0, max_tokens=size) for size in (3, 9, 1)]
    together = llm.generate(prompts, params, speculation=["off", "auto", "ngram"])
    for prompt, own, output in zip(prompts, params, together, strict=True):
        alone = llm.generate(prompt, own, speculation="off")[0]
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_speculation_is_reported_per_request(llm: LLM) -> None:
    # Drafts that need not pay: on so small a model they hardly do.
    llm = LLM(llm.engine.config.model, draft_policy="fixed", kv_blocks=60, max_num_seqs=2)
    prompt = [5, 6, 7, 8] * 6
    bias = {5: 100.0, 6: 100.0, 7: 100.0}
    params = SamplingParams(temperature=0, max_tokens=40, logit_bias=bias, ignore_eos=True)
    off, on = llm.generate([prompt, prompt], params, speculation=["off", "auto"])
    assert off.outputs[0].token_ids == on.outputs[0].token_ids
    assert off.outputs[0].speculation.verified == 0
    stats = on.outputs[0].speculation
    assert stats.accepted_length == pytest.approx(40 / stats.rounds)
    assert stats.offered >= stats.verified > 0
    assert stats.accepted == sum(name == "ngram" for name in on.outputs[0].proposed_by)


def test_max_draft_tokens_zero_is_plain_decoding(llm: LLM) -> None:
    choice = {"method": "auto", "max_draft_tokens": 0}
    output = llm.generate([5, 6] * 9, GREEDY, speculation=choice)[0].outputs[0]
    assert output.speculation.verified == output.speculation.offered == 0


def test_choices_share_the_prompt_and_differ_by_choice_index(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate(LOOP, params)[0] for _ in range(2))
    texts = [output.token_ids for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(text) for text in texts}) == 3
    assert texts == [output.token_ids for output in again.outputs]
    one = llm.generate(
        LOOP, SamplingParams(temperature=1.5, seed=5, max_tokens=12, ignore_eos=True)
    )
    assert one[0].outputs[0].token_ids == texts[0]


def test_without_a_seed_texts_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
    texts = {tuple(llm.generate(LOOP, params)[0].outputs[0].token_ids) for _ in range(3)}
    assert len(texts) == 3


def test_stream_gives_the_text_of_generate(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=8, max_tokens=30, ignore_eos=True)
    whole = llm.generate(LOOP, params)[0].outputs[0]
    chunks = list(llm.stream(LOOP, params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert all("".join(text for text, _ in chunk.pieces) == chunk.text for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.finish_reason for chunk in chunks[:-1]} <= {None}


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(LOOP, GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_stop_strings_end_the_text_before_or_after_them(llm: LLM) -> None:
    whole = llm.generate(LOOP, GREEDY)[0].outputs[0]
    stop = whole.text[7:11]
    at = whole.text.find(stop)
    for keep in (False, True):
        for method in ("off", "auto"):
            params = SamplingParams(
                temperature=0,
                max_tokens=24,
                ignore_eos=True,
                stop=["@@@@", stop],
                include_stop_str_in_output=keep,
            )
            output = llm.generate(LOOP, params, speculation=method)[0].outputs[0]
            assert output.text == whole.text[: at + len(stop) * keep]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            assert len(output.token_ids) < 24
            streamed = "".join(chunk.text for chunk in llm.stream(LOOP, params))
            assert streamed == output.text


def test_min_tokens_holds_stop_strings_back(llm: LLM) -> None:
    whole = llm.generate(LOOP, GREEDY)[0].outputs[0]
    stop = whole.text[:2]
    params = SamplingParams(temperature=0, max_tokens=24, min_tokens=6, ignore_eos=True, stop=stop)
    assert len(llm.generate(LOOP, params)[0].outputs[0].token_ids) >= 6


def test_stop_token_ids_name_themselves_and_stay_out_of_the_text(llm: LLM) -> None:
    whole = llm.generate(LOOP, GREEDY)[0].outputs[0]
    token = whole.token_ids[5]
    cut = whole.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[token])
    output = llm.generate(LOOP, params)[0].outputs[0]
    assert output.token_ids == whole.token_ids[: cut + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.text == llm.tokenizer.decode(whole.token_ids[:cut], skip_special_tokens=True)


def test_the_models_end_token_is_no_stop_reason(llm: LLM) -> None:
    [end] = llm.engine.decoder.config.eos_token_ids
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias={end: 100.0})
    for method in ("off", "auto"):
        output = llm.generate(LOOP, params, speculation=method)[0].outputs[0]
        assert len(output.token_ids) == 4 and output.token_ids[-1] == end
        assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    output = llm.generate([5, 6, 7, 5, 6], params)[0]
    own = output.outputs[0].logprobs
    assert own is not None and output.prompt_logprobs is not None
    assert [entry.token_id for entry in own] == output.outputs[0].token_ids
    assert all(entry.rank == 1 and entry.top[0][1] == entry.logprob for entry in own)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(x.logprob for x in own))
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry] == [6, 7, 5, 6]


def test_prompt_logprobs_bypass_prefix_hits(llm: LLM) -> None:
    prompt = list(range(10, 40))
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate(prompt, params)[0]
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 30
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens == 28


def test_chat_applies_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "the cat"}]
    ids = llm.render_chat(talk)
    assert "assistant" in llm.tokenizer.decode(ids)
    assert llm.chat(talk, GREEDY)[0].outputs[0].token_ids == (
        llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    )
    assert len(llm.chat([talk, talk], GREEDY)) == 2


BAD: list[tuple[str, Any, dict[str, Any], Any]] = [
    ("prompt", "", {}, None),
    ("prompt", [99999], {}, None),
    ("prompt", [-1], {}, None),
    ("prompt", [5] * 600, {}, None),
    ("prompts", [], {}, None),
    ("prompt", {"text": "x"}, {}, None),
    ("max_tokens", [5], {"max_tokens": 100_000}, None),
    ("logit_bias", [5], {"logit_bias": {99999: 1.0}}, None),
    ("stop_token_ids", [5], {"stop_token_ids": [99999]}, None),
    ("speculation.method", [5], {}, "eagle"),
    ("speculation.max_draft_tokens", [5], {}, {"max_draft_tokens": 60}),
    ("speculation.tokens", [5], {}, {"tokens": 3}),
]


@pytest.mark.parametrize(("option", "prompt", "values", "speculation"), BAD)
def test_bad_requests_name_the_option_and_cost_nobody_else(
    llm: LLM, option: str, prompt: Any, values: Any, speculation: Any
) -> None:
    neighbour = llm.stream(LOOP, GREEDY)
    first = next(neighbour).text
    params = SamplingParams(**{"max_tokens": 4, **values})
    with pytest.raises(SurefootError) as caught:
        llm.generate(prompt, params, speculation=speculation)
    assert caught.value.option == option
    assert str(caught.value).startswith(option) and "\n" not in str(caught.value)
    text = first + "".join(chunk.text for chunk in neighbour)
    assert text == llm.generate(LOOP, GREEDY)[0].outputs[0].text


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"n": 0},
        {"seed": -1},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": -1},
        {"prompt_logprobs": 99},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1: 101}},
        {"stop": ""},
        {"stop_token_ids": [-5]},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(values: Any) -> None:
    with pytest.raises(SurefootError) as caught:
        SamplingParams(**values)
    assert caught.value.option in values
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int3"},
        {"weights": "native", "backend": "torch"},
        {"max_num_seqs": 0},
        {"max_num_seqs": 64, "max_num_batched_tokens": 32},
        {"max_draft_tokens": 99},
        {"block_size": 0},
        {"max_model_len": 10**9},
        {"proposers": ("nobody",)},
        {"proposer_options": {"nobody": {}}},
        {"proposer_options": {"ngram": {"size": 3}}},
        {"device": "toaster"},
        {"no_such_option": 1},
        {"kv_cache_memory": 1},
    ],
)
def test_engine_options_are_refused_by_name(options: Any, tmp_path: Path) -> None:
    path = tiny_hf_model("llama", tmp_path)
    with pytest.raises(SurefootError) as caught:
        LLM(str(path), **options)
    name = caught.value.option
    assert name.split(".")[0] in (*options, "ngram", "proposers"), name
    assert "\n" not in str(caught.value)


def test_max_tokens_is_clamped_only_when_not_given(tmp_path: Path) -> None:
    path = tiny_hf_model("llama", tmp_path)
    llm = LLM(str(path), dtype="float32", max_model_len=32, calibration_seconds=0.0)
    params = SamplingParams(temperature=0, ignore_eos=True)
    output = llm.generate([5] * 20, params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (12, "length")
    with pytest.raises(SurefootError, match="use at most 12"):
        llm.generate([5] * 20, SamplingParams(max_tokens=13))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_text_does_not_depend_on_how_tokens_are_grouped(llm: LLM, data: Any) -> None:
    vocabulary = llm.tokenizer.vocab_size
    tokens = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=25))
    decoded = llm.tokenizer.decode(tokens, skip_special_tokens=True)
    stops = data.draw(
        st.lists(st.sampled_from([decoded[i : i + 3] or "x" for i in range(0, 20, 3)]), max_size=2)
    )
    params = SamplingParams(
        stop=stops or None,
        min_tokens=data.draw(st.integers(0, 3)),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))

    def texts(sizes: list[int]) -> tuple[str, str, int, str | None]:
        request = Request("r", (1,), params, SpeculationParams(), 0, 99)
        stream, taken, start = TextStream(request, llm.tokenizer), "", 0
        for size in sizes:
            group = tokens[start : start + size]
            start += size
            request.output += group
            last = start >= len(tokens)
            if last:
                request.finish(reason)
            stream.push(group, last=last)
            done = last or stream.stopped_by is not None
            taken += "".join(text for text, _ in stream.take(final=done))
            if done:
                break
        return stream.text, taken, stream.kept, stream.stopped_by

    one_by_one = texts([1] * len(tokens))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=len(tokens), max_size=len(tokens)))
    grouped = texts(sizes)
    assert one_by_one == grouped
    assert grouped[0] == grouped[1]
    if stops:
        return
    hidden = reason is FinishReason.STOP and not params.include_stop_str_in_output
    shown = tokens[: len(tokens) - hidden]
    assert grouped[0] == llm.tokenizer.decode(shown, params.skip_special_tokens)
    request = Request("r", (1,), params, SpeculationParams(), 0, 99, output=tokens)
    request.finish(reason)
    raw = Request("s", (1,), SamplingParams(skip_special_tokens=False), request.speculation, 0, 99)
    raw.output = tokens[::-1]
    other, whole = TextStream.whole([raw, request], llm.tokenizer)
    assert (whole.text, whole.kept) == (grouped[0], grouped[2])
    assert (other.text, other.kept) == (llm.tokenizer.decode(tokens[::-1]), len(tokens))


def test_a_stop_string_within_min_tokens_stops_nothing_later(llm: LLM) -> None:
    """Neither alone nor because a longer stop string is looked for further back."""
    short, other = llm.tokenizer.decode([4]), llm.tokenizer.decode([3])
    params = SamplingParams(stop=[short, other * 3], min_tokens=1)
    request = Request("r", (1,), params, SpeculationParams(), 0, 99)
    request.output = [4, 3, 5, 3, 4]
    stream, taken = TextStream(request, llm.tokenizer), ""
    for token in (4, 3, 5, 3, 4):
        stream.push([token], last=False)
        taken += "".join(text for text, _ in stream.take(final=stream.stopped_by is not None))
    assert stream.stopped_by == short and stream.kept == 5
    assert taken == stream.text == llm.tokenizer.decode([4, 3, 5, 3])
