"""lm-eval's ``local-completions``: likelihoods of texts, and texts until a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from server_harness import Server, offline
from surefoot import SamplingParams

PAIRS = [
    ("the cat sat on", " the mat"),
    ("step by", " step"),
    ("a dog", " ate the hat"),
    ("1 2", " 3"),
]


@pytest.fixture
def client(server: Server, model: Path) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="llama-0",
        tokenizer=str(model),
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_retries=1,
    )


def test_likelihoods_are_those_of_the_target(client: Any, model: Path) -> None:
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    told = client.loglikelihood(requests)
    llm = offline(model)
    for (context, continuation), (sum_told, greedy) in zip(PAIRS, told, strict=True):
        tokens = llm.tokenizer.encode(context + continuation)
        given = len(llm.tokenizer.encode(context))
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        [output] = llm.generate({"prompt_token_ids": tokens}, params)
        scores = (output.prompt_logprobs or [])[given:]
        assert sum_told == pytest.approx(sum(score.logprob for score in scores), abs=1e-3)
        assert greedy == all(score.rank == 1 for score in scores)


def test_texts_end_where_asked(client: Any, model: Path) -> None:
    until = {"until": ["a"], "max_gen_toks": 24, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (context, dict(until)), number)
        for number, (context, _) in enumerate(PAIRS)
    ]
    llm = offline(model)
    params = SamplingParams(temperature=0, max_tokens=24, stop=["a"])
    for (context, _), text in zip(PAIRS, client.generate_until(requests), strict=True):
        [output] = llm.generate(context, params)
        assert text == output.outputs[0].text
