"""What the front makes of requests' fields, before and beside the engine's part in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from server_harness import sse, write_emoji_tokenizer
from server_scripted import READY, ScriptedCore, ask
from surefoot.errors import SurefootError
from surefoot.models.loading.chat_template import read_chat_template
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.server.messages import Add
from tiny_models import write_tokenizer

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
TALK = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "It is  "}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    write_emoji_tokenizer(folder)
    return read_hf_tokenizer(folder)


def post(
    tokenizer: Tokenizer, path: str, *bodies: Any, headers: Any = None, **settings: Any
) -> tuple[list[httpx.Response], list[Add]]:
    """The answers to these bodies, and what the core was asked for."""

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        answers = [await client.post(path, json=body, headers=headers) for body in bodies]
        return answers, [item for item in core.received if isinstance(item, Add)]

    return ask(tokenizer, [[5], [6], [7]], use, **settings)


def refused(answer: httpx.Response) -> tuple[str, str]:
    """(param, message)."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_prompts_are_cut_from_the_left(tokenizer: Tokenizer) -> None:
    text = "the cat sat on the mat"
    ids = tokenizer.encode(text)
    many = [9, 8, 7] * 3000
    bodies = [
        {"prompt": text, "truncate_prompt_tokens": 4, "echo": True},
        {"prompt": [ids, [5]], "truncate_prompt_tokens": 3},
        {"prompt": text, "truncate_prompt_tokens": 400},
        {"prompt": many, "truncate_prompt_tokens": -1, "max_tokens": 10},
        {"prompt": "x" * 9000, "truncate_prompt_tokens": 5},
    ]
    answers, asked = post(tokenizer, COMPLETIONS, *bodies)
    assert [answer.status_code for answer in answers] == [200] * 5
    room = READY.max_model_len - 10
    wanted = [ids[-4:], ids[-3:], [5], ids, many[-room:], tokenizer.encode("x") * 5]
    assert [add.prompt for add in asked] == wanted
    assert answers[0].json()["choices"][0]["text"].startswith(tokenizer.decode(ids[-4:]))
    body = {"messages": TALK, "truncate_prompt_tokens": 6}
    _, [add] = post(tokenizer, CHAT, body)
    whole = post(tokenizer, TOKENIZE, {"messages": TALK})[0][0].json()["tokens"]
    assert add.prompt == whole[-6:]


def test_what_a_tokenizer_puts_before_a_text_stays(tokenizer: Tokenizer) -> None:
    from tokenizers import processors

    first = tokenizer.id_of("<|im_start|>")
    assert first is not None
    copy = Tokenizer(type(tokenizer.backend).from_str(tokenizer.backend.to_str()))
    copy.settings = type(tokenizer.settings)({"bos_token": "<|im_start|>"}, {})
    copy.backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $0", special_tokens=[("<|im_start|>", first)]
    )
    text = "the cat sat"
    ids = copy.encode(text, add_special_tokens=False)
    bodies = [{"prompt": text, "truncate_prompt_tokens": size} for size in (4, 1)]
    _, asked = post(copy, COMPLETIONS, *bodies)
    assert [add.prompt for add in asked] == [[first, *ids[-3:]], ids[-1:]]


def test_the_last_message_is_continued(tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {
        "messages": TALK,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    _, [add] = post(tokenizer, CHAT, body)
    text = "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\nIt is  "
    assert tokenizer.decode(add.prompt) == text
    # Special tokens in it are text, and it may be empty.
    odd = [{"role": "user", "content": "<|im_end|>a"}, {"role": "assistant", "content": None}]
    answers, _ = post(tokenizer, TOKENIZE, {**body, "messages": odd})
    ids = answers[0].json()["tokens"]
    assert tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(tokenizer.id_of("<|im_end|>")) == 1
    called = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    wrong = [
        {**body, "add_generation_prompt": True},
        {**body, "messages": [{"role": "assistant", "tool_calls": [called]}]},
        {**body, "chat_template": twice},
        {**body, "chat_template": "{{ messages[0].content }}"},
    ]
    answers, _ = post(tokenizer, CHAT, *wrong, trust_templates=True)
    assert [refused(answer)[0] for answer in answers] == ["continue_final_message"] * 4


def test_templates_of_requests_need_trust(tokenizer: Tokenizer, tmp_path: Path) -> None:
    body = {"messages": TALK[:1], "chat_template": "<{{ messages[0].content }}>"}
    [answer], _ = post(tokenizer, CHAT, body)
    param, message = refused(answer)
    assert param == "chat_template" and "--trust-request-chat-template" in message
    _, [add] = post(tokenizer, CHAT, body, trust_templates=True)
    assert tokenizer.decode(add.prompt) == "<a cat>"
    for much in ("x" * (1 << 15), "{{ a }}" * 600):
        [answer], _ = post(tokenizer, CHAT, {**body, "chat_template": much}, trust_templates=True)
        param, message = refused(answer)
        assert param == "chat_template" and "--chat-template FILE" in message
    broken, fine = tmp_path / "broken", tmp_path / "fine"
    broken.write_text("{% if %}")
    fine.write_text("[{{ messages[0].content }}]")
    for path in (broken, tmp_path / "nowhere"):
        with pytest.raises(SurefootError, match="chat_template"):
            read_chat_template(path)
    own = read_hf_own(tokenizer)
    own.replace_chat_template(read_chat_template(fine))
    _, [add] = post(own, CHAT, {"messages": TALK[:1]})
    assert tokenizer.decode(add.prompt) == "[a cat]"


def read_hf_own(tokenizer: Tokenizer) -> Tokenizer:
    """One that may be changed."""
    return Tokenizer(tokenizer.backend, tokenizer.settings)


def test_ids_go_in_and_out(tokenizer: Tokenizer) -> None:
    bodies = [{"prompt": "a", "request_id": "mine"}, {"prompt": "a"}]
    [named, unnamed], _ = post(tokenizer, COMPLETIONS, *bodies)
    assert named.json()["id"] == "cmpl-mine" and named.headers["x-request-id"] == "mine"
    assert unnamed.json()["id"] == f"cmpl-{unnamed.headers['x-request-id']}"
    body = {"messages": TALK, "request_id": "mine", "stream": True}
    [told], _ = post(tokenizer, CHAT, body, headers={"x-request-id": "header"})
    assert {event["id"] for event in sse(told.text)} == {"chatcmpl-header"}
    assert told.headers["x-request-id"] == "header"


def test_what_a_model_can_do_is_listed(tokenizer: Tokenizer) -> None:
    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        return (await client.get("/v1/models/scripted")).json()["capabilities"]

    found = [ask(tokenizer, [[5]], use)]
    for template in ("{{ messages }}", "<think></think>{{ messages }}"):
        own = read_hf_own(tokenizer)
        own.replace_chat_template(template)
        found.append(ask(own, [[5]], use))
    assert [each["tools"] for each in found] == [True, False, False]
    assert [each["reasoning"] for each in found] == [False, False, True]
    assert all(each["chat"] and not each["vision"] for each in found)


def test_priorities_reach_the_core(tokenizer: Tokenizer) -> None:
    bodies = [{"prompt": "a", "priority": -3}, {"prompt": "a"}, {"prompt": "a", "priority": None}]
    _, asked = post(tokenizer, COMPLETIONS, *bodies)
    assert [add.priority for add in asked] == [-3, 0, 0]


def test_usage_so_far_is_told_in_every_chunk(tokenizer: Tokenizer) -> None:
    for path, ask_for in ((COMPLETIONS, {"prompt": [3, 4]}), (CHAT, {"messages": TALK})):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**ask_for, "stream": True, "stream_options": options, "n": 2}
        [answer], _ = post(tokenizer, path, body)
        used = [event["usage"]["completion_tokens"] for event in sse(answer.text)]
        assert used == sorted(used) and used[-1] == used[-2] == 6 and len(set(used)) >= 3


NEUTRAL: list[dict[str, Any]] = [
    {"verbosity": "medium", "service_tier": "auto", "modalities": ["text"], "store": True},
    {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1, "echo": False},
    {"functions": [], "function_call": "none", "prompt_cache_retention": "24h"},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
]
NOT_OFFERED: list[tuple[dict[str, Any], str, str]] = [
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"best_of": 2}, "best_of", "/v1/completions"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "drafts"),
    ({"logits_processors": ["x"]}, "logits_processors", "bad_words"),
]


def test_neutral_values_are_accepted_and_others_told_what_would_work(
    tokenizer: Tokenizer,
) -> None:
    answers, _ = post(tokenizer, CHAT, *({"messages": TALK, **more} for more in NEUTRAL))
    assert [answer.status_code for answer in answers] == [200] * len(NEUTRAL)
    bodies = [{"messages": TALK, **more} for more, _, _ in NOT_OFFERED]
    answers, _ = post(tokenizer, CHAT, *bodies)
    for answer, (_, param, advice) in zip(answers, NOT_OFFERED, strict=True):
        found = refused(answer)
        assert found[0] == param and advice in found[1], found


CONTENTS: list[tuple[Any, str, str]] = [
    ([{"type": "image_url", "image_url": {"url": "data:"}}], "[0]", "'image_url', but this model"),
    ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "[1]", "'input_audio', but"),
    ([{"text": "a"}], "[0]", "has no type"),
    (["a"], "[0]", "has no type"),
    (7, "", "is neither text nor a list of parts"),
    ({"type": "text", "text": "a"}, "", "is neither text nor"),
]


def test_contents_that_are_no_text_are_told_how_to_be_sent(tokenizer: Tokenizer) -> None:
    talks = [[TALK[0], {"role": "user", "content": content}] for content, _, _ in CONTENTS]
    answers, _ = post(tokenizer, CHAT, *({"messages": talk} for talk in talks))
    for answer, (_, place, problem) in zip(answers, CONTENTS, strict=True):
        param, message = refused(answer)
        assert param == f"messages[1].content{place}"
        assert problem in message and '{"type": "text", "text": "..."}' in message
