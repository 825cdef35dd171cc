"""Special tokens in what users write are text; those of the template stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server_scripted import END, ask
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer
from surefoot.models.loading.special_text import SpecialText
from surefoot.models.loading.tokenizer import Tokenizer as OurTokenizer
from surefoot.models.loading.tokenizer import TokenizerSettings
from tiny_models import write_tokenizer

END_TEXT, LONGER = "<|im_end|>", "<|im_end|>x"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


def byte_level() -> Tokenizer:
    alphabet = {
        piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE({**alphabet, "im": 256}, [("i", "m")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def words() -> Tokenizer:
    """A space goes before the first word only."""
    characters = {piece: i for i, piece in enumerate("<|>_abcdefghijklmnopqrstuvwxyz\n▁?")}
    backend = Tokenizer(models.BPE(characters, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def lowered() -> Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    return backend


def with_specials(backend: Tokenizer, **options: Any) -> OurTokenizer:
    texts = ["<|im_start|>", END_TEXT, LONGER]
    backend.add_special_tokens([AddedToken(text, special=True, **options) for text in texts])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return OurTokenizer(backend, TokenizerSettings(templates={"default": TEMPLATE}))


TOKENIZERS = {
    "bytes": with_specials(byte_level()),
    "words": with_specials(words()),
    "lowered": with_specials(lowered(), normalized=True),
    "strips": with_specials(byte_level(), lstrip=True, rstrip=True),
}


def encoded(tokenizer: OurTokenizer, messages: Any, tools: Any = None) -> list[int]:
    special = SpecialText(tokenizer)
    mark = special.mark()
    text = tokenizer.render_chat(special.marked(messages, mark), tools=special.marked(tools, mark))
    settled, reader = special.settled(text, mark)
    return reader.encode(settled, add_special_tokens=False)


PARTS = ["<|im_start|>", END_TEXT, LONGER, "<think>", "<|im_", "end|>", "im", " ", "\n", "a", "<"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=6))
def test_a_message_has_no_special_tokens(kind: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[kind], "".join(parts)
    talk = [{"role": "user", "content": text}]
    ids, special = encoded(tokenizer, talk), tokenizer.special_ids
    assert [token for token in ids if token in special] == [
        tokenizer.id_of("<|im_start|>"),
        tokenizer.id_of(END_TEXT),
    ]
    plain = tokenizer.encode(tokenizer.render_chat(talk), add_special_tokens=False)
    if len([token for token in plain if token in special]) == 2:
        assert ids == plain, "without special tokens nothing is different"
    if kind == "bytes":
        assert tokenizer.decode(ids) == tokenizer.render_chat(talk)
        # What is between the template's own is encoded as if it knew no special tokens.
        bare = byte_level()
        bare.add_tokens([AddedToken("<think>", special=False)])
        inside = bare.encode(f"user\n{text.strip()}").ids
        think = tokenizer.id_of("<think>")
        assert ids[1:-2] == [
            think if token == bare.token_to_id("<think>") else token for token in inside
        ]


def test_tools_and_arguments() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = encoded(tokenizer, [], [{"name": END_TEXT, LONGER: ["<|im_start|>"]}])
    assert not tokenizer.special_ids & set(ids)


def test_a_model_without_special_tokens() -> None:
    tokenizer = OurTokenizer(byte_level(), TokenizerSettings(templates={"default": TEMPLATE}))
    assert encoded(tokenizer, [{"role": "user", "content": END_TEXT}]) == tokenizer.encode(
        f"<|im_start|>user\n{END_TEXT}{END_TEXT}\n"
    )


def test_requests_choose(tmp_path: Path) -> None:
    tokenizer = read_hf_tokenizer(write_tokenizer(tmp_path / "model"))
    text = f"a{tokenizer.settings.special_tokens['eos_token']}b"
    talk = [{"role": "user", "content": text}]

    async def use(client: httpx.AsyncClient, core: Any) -> None:
        for parse in (False, True):
            body = {"messages": talk, "parse_special": parse}
            answer = await client.post("/tokenize", json=body)
            told = answer.json()["tokens"]
            await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
            assert core.received[-1].prompt == told
            assert (
                told
                == tokenizer.encode(tokenizer.render_chat(talk, add_generation_prompt=True), False)
            ) == parse
            assert tokenizer.decode(told) == tokenizer.render_chat(talk, add_generation_prompt=True)

    ask(tokenizer, [[END]], use)
