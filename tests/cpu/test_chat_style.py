"""What chat templates tell of answers, and how that shows over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from server_scripted import END, ScriptedCore, ask
from surefoot.errors import SurefootError
from surefoot.models.loading.embedded import EMBEDDED
from surefoot.models.loading.tokenizer import Tokenizer, TokenizerSettings
from surefoot.server.answer_events import Answer, CallArguments, CallStart, Content, Reasoning
from surefoot.server.chat_style import ChatStyle
from surefoot.server.messages import Add
from surefoot.server.tool_choice import CallGrammar
from tiny_models import tiny_tokenizer_json

# As in templates of these models.
TEMPLATES = {
    "hermes": ("{{ tools }}<tool_call>\n{{'{'}}\"name\": <function-name>", "hermes"),
    "llama 3.1": ("{{ tools }}{{ '<|python_tag|>' + tool_call.name }}", "llama3_json"),
    "llama 3.2": ('{{ tools }}Respond in the format {"name": function name, "parameters": '
                  "dictionary of argument name and its value}", "llama3_json"),
    "mistral": ("{{ tools }}{{ '[TOOL_CALLS] [' }}", "mistral"),
    "none of its own": ("{{ tools }}", "json"),
    "qwen 2.5": ("{% if tools %}within <tool_call></tool_call> XML tags{% endif %}"
                 "{{ message['tool_calls'] }}", "hermes"),
    "glm": ("{{ tools }}<tool_call>{name}\n<arg_key>", None),
    "phi": ("{{ tools }}<|tool_call|>", None),
    "nemotron": ("{{ tools }}<TOOLCALL>[", None),
    "seed": ("{{ tools }}</seed:tool_call>", None),
    "qwen 3 coder": ("{{ tools }}<tool_call>\n<function=example>", None),
    "deepseek": ("{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>", None),
}  # fmt: skip


def tokenizer(template: str, *special: str) -> Tokenizer:
    backend = Backend.from_str(tiny_tokenizer_json())
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, TokenizerSettings(templates={"default": template}))


@pytest.mark.parametrize(("template", "name"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_tell_how_calls_are_written(template: str, name: str | None) -> None:
    style = ChatStyle.of(template, tokenizer(template))
    assert (style.tools and style.tools.name) == name
    assert style.description.endswith(name or "its calls are not read")
    if name is None:
        with pytest.raises(SurefootError, match="--tool-call-parser"):
            style.check_tools()
        style = ChatStyle.of(template, tokenizer(template), "json")
    style.check_tools()


def test_templates_tell_of_reasoning() -> None:
    for template, prompt, inside, may in (
        ("{{ a }}</think>", "user: hi\nassistant: <think>\n", True, True),
        ("{{ a }}</think>", "user: hi\nassistant: <think>\n\n</think>\n\n", False, False),
        ("{{ a }}</think>", "assistant: ", False, True),
        ("{{ a }}[/THINK]", "assistant: [THINK]", True, True),
        ("{{ a }}", "assistant: <think>", False, False),
    ):
        style = ChatStyle.of(template, tokenizer(template))
        assert (style.thinks(prompt), style.may_think(prompt)) == (inside, may)


def test_reasoning_fields_become_the_templates_variables() -> None:
    def variables(template: str, *given: Any) -> dict[str, Any]:
        return ChatStyle.of(template, tokenizer(template)).reasoning_variables(*given)

    both = "{{ reasoning_effort }}{{ enable_thinking }}"
    assert variables(both, "low", None) == {"reasoning_effort": "low"}
    assert variables(both, "low", True) == {"reasoning_effort": "low", "enable_thinking": True}
    assert variables("{{ enable_thinking }}", "none", None) == {"enable_thinking": False}
    assert variables("{{ thinking }}", "high", None) == {"thinking": True}
    assert variables("{{ thinking }}", None, False) == {"thinking": False}
    assert variables("", None, None) == {}
    for template, given, field in (
        ("", ("low", None), "reasoning_effort"),
        ("{{ reasoning_effort }}", (None, True), "enable_thinking"),
        ("{% set enable_thinking = 1 %}{{ enable_thinking }}", (None, True), "enable_thinking"),
        ("{{ enable_thinking }}", ("none", True), "enable_thinking"),
    ):
        with pytest.raises(SurefootError) as caught:
            variables(template, *given)
        assert caught.value.option == field


def test_tools_for_the_embedded_model() -> None:
    template = EMBEDDED["smollm2-135m"].templates()["tool_use"]
    made = tokenizer("{{ messages }}")
    made.add_chat_templates({"tool_use": template, "default": "{{ other }}"})
    assert made.settings.templates == {"tool_use": template, "default": "{{ messages }}"}
    call = {"name": "wait", "arguments": {"s": [1, "</tool_call> é"]}}
    messages = [
        {"role": "user", "content": "Wait."},
        {"role": "assistant", "content": "Yes.", "tool_calls": [{"function": call}] * 2},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = made.render_chat(messages, tools=TOOLS)
    turns = [turn.partition("\n") for turn in text.split("<|im_start|>")]
    assert [role for role, _, _ in turns] == [
        "",
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert '{"name": "wait", "strict": true}\n</tools>' in turns[1][2]
    assert turns[4][2].count("<tool_response>") == 2 and turns[5][2] == ""
    style = ChatStyle.styles(made)[True]
    assert style.tools is not None and style.tools.name == "hermes" and style.reasoning is None
    # What the template writes is what is read, and what a grammar makes of it.
    written = turns[3][2].removesuffix("<|im_end|>\n")
    read = Answer.of(style.parser(["wait"], False).feed(written, final=True))
    assert [call.name for call in read.calls] == ["wait", "wait"] and read.content == "Yes."
    assert json.loads(read.calls[1].arguments) == call["arguments"]
    tools = [("wait", None)]
    grammar = str(CallGrammar(style.tools, {}, tools, True).required().grammar)
    assert all(
        json.dumps(part) in grammar for part in ("<tool_call>", '{"name": "wait", "arguments": ')
    )
    system = {"role": "system", "content": "Be brief."}
    told = made.render_chat([system, *messages], tools=TOOLS, add_generation_prompt=False)
    assert told.startswith("<|im_start|>system\nBe brief.\n") and told.count("system\n") == 1
    assert told.endswith("<|im_end|>\n")
    with pytest.raises(SurefootError, match=r"tools: .*takes none"):
        made.render_chat(messages, tools=TOOLS, chat_template="{{ tool_calls }}")


THINKING = (
    "{% if tools %}{{ tools | tojson }} [TOOL_CALLS][ARGS]{% endif %}"
    "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content or m.reasoning }}\n{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}[THINK]{% endif %}"
    "{# [/THINK] #}"
)
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
TOOLS: Any = [{"type": "function", "function": {"name": "wait", "strict": True}}]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}


def answers(text: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Add]:
    """The whole choice, the chunks' deltas, and what the core was asked for."""
    made = tokenizer(THINKING, *SPECIAL)
    script = [[token] for token in [*made.encode(text), END]]

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> Any:
        path = "/v1/chat/completions"
        whole = await client.post(path, json={**CHAT, **body})
        assert whole.status_code == 200, whole.text
        streamed = await client.post(path, json={**CHAT, **body, "stream": True})
        events = streamed.text.split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        details = whole.json()["usage"]["completion_tokens_details"]
        before, ended, _ = text.partition("[/THINK]")
        if not body.get("enable_thinking", True) or body.get("reasoning_effort") == "none":
            before = ended = ""
        assert details["reasoning_tokens"] == len(made.encode(before + ended))
        [add, _] = [message for message in core.received if isinstance(message, Add)]
        assert chunks[-1]["finish_reason"] == whole.json()["choices"][0]["finish_reason"]
        return whole.json()["choices"][0], [chunk["delta"] for chunk in chunks], add

    return ask(made, script, use)


def told(deltas: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for delta in deltas:
        assert delta.get("reasoning") == delta.get("reasoning_content")
        answer.add(Reasoning(delta.get("reasoning") or ""))
        answer.add(Content(delta.get("content") or ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                answer.add(CallStart(call["index"], call["id"], call["function"]["name"]))
            answer.add(CallArguments(call["index"], call["function"]["arguments"]))
    return answer


def test_reasoning_and_calls_behind_special_tokens() -> None:
    text = 'I wait.\n[/THINK]Well:\n[TOOL_CALLS]wait[ARGS]{"s": [1]}'
    whole, deltas, add = answers(text, tools=TOOLS)
    message, streamed = whole["message"], told(deltas)
    assert message["reasoning_content"] == message["reasoning"] == streamed.reasoning == "I wait."
    assert message["content"] == streamed.content == "Well:"
    [call] = message["tool_calls"]
    assert call["function"] == streamed.calls[0].json()["function"]
    assert call["function"] == {"name": "wait", "arguments": '{"s": [1]}'}
    assert whole["finish_reason"] == "tool_calls"
    assert sum("arguments" in str(delta) for delta in deltas) > 3, "the arguments come at once"
    wanted = add.params.structured_outputs
    assert wanted is not None and wanted.reasoning == ("", "[/THINK]") and "call_0" in str(wanted)


def test_reasoning_can_be_left_out() -> None:
    text = "I wait.\n[/THINK]Well"
    whole, deltas, _ = answers(text, include_reasoning=False)
    assert whole["message"] == {"role": "assistant", "content": "Well", "refusal": None}
    assert told(deltas) == Answer("Well")


def test_structure_is_of_what_comes_behind_reasoning() -> None:
    _, _, add = answers("{}", response_format={"type": "json_object"})
    wanted = add.params.structured_outputs
    assert wanted is not None and wanted.json_object and wanted.reasoning == ("", "[/THINK]")
    _, _, add = answers("{}", response_format={"type": "json_object"}, enable_thinking=False)
    wanted = add.params.structured_outputs
    assert wanted is not None and wanted.reasoning == ("[THINK]", "[/THINK]")
    _, _, add = answers("Hi", tools=TOOLS, tool_choice="none")
    assert add.params.structured_outputs is None


def test_fields_reach_the_template() -> None:
    made = tokenizer(THINKING, *SPECIAL)

    def prompt(**body: Any) -> str:
        return made.decode(answers("Hi", **body)[2].prompt)

    assert prompt().endswith("[THINK]")
    assert prompt(reasoning_effort="low").endswith("[THINK]")
    for fields in ({"reasoning_effort": "none"}, {"enable_thinking": False}):
        assert prompt(**fields).endswith("|\n")
    for name in ("reasoning", "reasoning_content"):
        before = [{"role": "assistant", "content": "a", name: "so"}, *CHAT["messages"]]
        assert prompt(messages=before).startswith("a|so\n")


def test_fields_that_contradict_are_refused() -> None:
    made = tokenizer(THINKING)

    async def use(client: httpx.AsyncClient, core: ScriptedCore) -> list[str]:
        named = []
        for fields in (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
            {"reasoning_effort": "much"},
        ):
            answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
            assert answer.status_code == 400, answer.text
            named.append(answer.json()["error"]["param"])
        return named

    named = ask(made, [[END]], use)
    assert named == ["enable_thinking", "reasoning_effort", "enable_thinking", "reasoning_effort"]
