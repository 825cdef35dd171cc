"""Tokenizers and chat templates against ``tokenizers`` and transformers."""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tokenizers import decoders, models, pre_tokenizers

from surefoot.errors import SurefootError
from surefoot.models.loading.chat_template import render_chat_template
from surefoot.models.loading.detokenizer import WINDOW
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.gguf_tokenizer import merges_of_scores, read_gguf_tokenizer
from surefoot.models.loading.hf_tokenizer import read_hf_tokenizer, set_ends
from surefoot.models.loading.tokenizer import IncrementalDetokenizer, Tokenizer
from tiny_models import (
    SPECIALS,
    tiny_gguf,
    tiny_gguf_vocabulary,
    tiny_tokenizer_json,
    tiny_weights,
    write_tokenizer,
)

TEXTS = [
    "the cat sat on 1234 mats",
    "<|im_start|>user\nhello<|im_end|>\n",
    "🦶 surefoot 👩‍🚀 naïve 中文 \u200b\t\r\n  x",
    " leading and trailing ",
    "",
]
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=40) | st.text(
    "ab 🦶👩‍🚀é中\n0", max_size=20
)


def gguf_tokenizer(path: Path, **metadata: Any) -> Tokenizer:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    config, weights = tiny_weights("llama", layers=1)
    return read_gguf_tokenizer(GgufFile(tiny_gguf(path / "t.gguf", config, weights, metadata=keys)))


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types of a small SentencePiece BPE model with byte fallback."""
    words = ["▁the", "th", "he", "▁t", "▁th", "▁c", "at", "▁cat", "ab", "abc", "bc", "▁▁", "▁a"]
    letters = list("▁thecabx")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # Distinct, and in another order than the ids.
    scores = [0.0] * len(pieces) + [-float(index * 5 % 13) for index in range(len(words))]
    scores += [-100.0 - index for index in range(len(letters))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    return pieces + words + letters, scores, kinds


def sentencepiece(path: Path, **metadata: Any) -> Tokenizer:
    pieces, scores, kinds = sentencepiece_vocabulary()
    return gguf_tokenizer(
        path,
        **{
            "model": "llama",
            "tokens": pieces,
            "scores": scores,
            "token_type": kinds,
            "merges": None,
            "pre": None,
            "unknown_token_id": 0,
            **metadata,
        },
    )


# -- Hugging Face folders -----------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True])
def test_equals_transformers(ends: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # With a tokenizer.json, its post-processor counts and not the config's add_bos_token.
    folder = write_tokenizer(tmp_path, add_bos_token=not ends)
    if ends:
        backend = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
        set_ends(backend, SPECIALS[1], SPECIALS[2])
        backend.save(str(folder / "tokenizer.json"))
    ours, theirs = read_hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.vocab_size == len(theirs) == 288
    assert ours.special_ids == set(theirs.all_special_ids)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, 0)
    assert ours.bos_id == theirs.bos_token_id
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    write_tokenizer(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = read_hf_tokenizer(tmp_path).encode("abcxyz" * 4)
    assert 2 < len(ids) < 50


def test_declared_tokens_are_added(tmp_path: Path) -> None:
    declared = {
        "288": {"content": "<|tool|>", "special": True},
        "289": {"content": "<think>", "special": False},
    }
    tokenizer = read_hf_tokenizer(write_tokenizer(tmp_path, added_tokens_decoder=declared))
    assert tokenizer.encode("<|tool|><think>") == [288, 289]
    assert tokenizer.decode([288, 289], skip_special_tokens=True) == "<think>"
    declared["400"] = {"content": "<gap>", "special": True}
    with pytest.raises(SurefootError, match="'<gap>' an id that it cannot have"):
        read_hf_tokenizer(write_tokenizer(tmp_path, added_tokens_decoder=declared))


def test_broken_or_missing_tokenizers_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SurefootError, match=r"tokenizer\.json is no usable tokenizer"):
        read_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(SurefootError, match=r"has no tokenizer\.json; copy"):
        read_hf_tokenizer(tmp_path)


def test_slow_tokenizers_are_converted(tmp_path: Path) -> None:
    parts = json.loads(tiny_tokenizer_json())["model"]
    config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": SPECIALS[0]}
    write_tokenizer(tmp_path, **config)
    (tmp_path / "tokenizer.json").rename(tmp_path / "kept")
    (tmp_path / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in parts["merges"]))
    slow = read_hf_tokenizer(tmp_path)
    (tmp_path / "kept").rename(tmp_path / "tokenizer.json")
    fast = read_hf_tokenizer(tmp_path)
    for text in TEXTS:
        assert slow.encode(text, False) == fast.encode(text, False)


def test_templates_by_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    write_tokenizer(tmp_path, chat_template=named)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer.render_chat([]) == tokenizer.chat_template == "plain"
    assert tokenizer.render_chat([], tools=[{"name": "f"}]) == "tools 1"
    assert tokenizer.render_chat([], chat_template="own {{ x }}", x=3) == "own 3"
    write_tokenizer(tmp_path, chat_template="only {{ bos_token }}")
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert read_hf_tokenizer(tmp_path).render_chat([]) == "file <|im_end|>"
    (tmp_path / "chat_template.jinja").unlink()
    assert read_hf_tokenizer(tmp_path).render_chat([]) == "only <|im_start|>"
    bare = write_tokenizer(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(SurefootError, match=r"^messages: this model has no chat template"):
        read_hf_tokenizer(bare).render_chat([])


# -- Chat templates -----------------------------------------------------------------------------

TEMPLATES = {
    "blocks": "  {%- for m in messages %}\n    {% if loop.first %}\n  A{{ m.role }}\n"
    "    {% endif %}\n{{ m['content'] | trim }}\n{% endfor %}\nend\n",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}|{{ t | tojson }}"
    "{% endfor %}{% endif %}{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ bos_token }}{{ missing is defined }}{{ dict(a=1).a }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "thinking": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}",
    "date": "{{ strftime_now('%Y') }}{{ none }}{{ documents }}{{ 1.5 }}{{ true }}",
}
MESSAGES = [
    {"role": "system", "content": " be brief \n"},
    {"role": "user", "content": "<é> & 'x'"},
    {"role": "assistant", "content": "yes", "thinking": "hm"},
    {"role": "assistant", "content": "no", "reasoning": "ha"},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "description": 'say "<é>"'}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    if name == "thinking" and Version(version("transformers")) < Version("5.21"):
        pytest.skip("before 5.21 transformers knew reasoning by the template's own name only")
    variables = {"bos_token": "<s>", "enable_thinking": False}
    (expected,), _ = render_jinja_template(
        [MESSAGES],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **variables,
    )
    assert expected
    assert expected == render_chat_template(
        TEMPLATES[name], MESSAGES, tools=TOOLS, add_generation_prompt=True, **variables
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refused them: roles must alternate"),
        ("{% if %}", "refused them: Expected an expression"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refused them: "),
        ("{{ messages.append(1) }}", "refused them: "),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "refused them: "),
        ("{{ missing.attribute }}", "refused them: 'missing' is undefined"),
    ],
)
def test_templates_that_fail(template: str, message: str) -> None:
    with pytest.raises(SurefootError, match=r"^messages: ") as caught:
        render_chat_template(template, MESSAGES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_are_plain_data() -> None:
    with pytest.raises(SurefootError, match="cannot take a PosixPath"):
        render_chat_template("", [{"role": "user", "content": Path("/")}])
    with pytest.raises(SurefootError, match="give objects with a role"):
        render_chat_template("", ["hello"])  # type: ignore[list-item]


# -- GGUF ---------------------------------------------------------------------------------------


def test_gguf_equals_the_folder(tmp_path: Path) -> None:
    ours, theirs = gguf_tokenizer(tmp_path), read_hf_tokenizer(write_tokenizer(tmp_path / "hf"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.special_ids == theirs.special_ids == {0, 1, 2}
    assert ours.settings.special_tokens == {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    assert ours.chat_template == theirs.chat_template


def test_gguf_bos_eos_and_user_tokens(tmp_path: Path) -> None:
    kinds = list(tiny_gguf_vocabulary()["tokenizer.ggml.token_type"])
    pieces = list(tiny_gguf_vocabulary()["tokenizer.ggml.tokens"])
    pieces[287], kinds[287] = "<think>", 4
    merges = tiny_gguf_vocabulary()["tokenizer.ggml.merges"][:-1]
    changed = {"tokens": pieces, "token_type": kinds, "merges": merges}
    tokenizer = gguf_tokenizer(tmp_path, add_bos_token=True, add_eos_token=True, **changed)
    assert tokenizer.encode("<think>") == [1, 287, 2]
    assert tokenizer.encode("<think>", add_special_tokens=False) == [287]
    assert tokenizer.decode([1, 287], skip_special_tokens=True) == "<think>"
    # Llama 3's tokenizer begins with BOS unless the file says otherwise.
    assert gguf_tokenizer(tmp_path, pre="llama-bpe").encode("")[:1] == [1]
    assert gguf_tokenizer(tmp_path, pre="llama-bpe", add_bos_token=False).encode("") == []


SAMPLE = "It's 20245 x  ¼²\n\n don'T!!\n"
CUTS = {
    "gpt-2": ["It", "'s", " 20245", " x", " ", " ¼²", "\n\n", " don", "'", "T", "!!", "\n"],
    "smollm": [
        "It",
        "'s",
        " ",
        "2",
        "0",
        "2",
        "4",
        "5",
        " x",
        "  ",
        "¼",
        "²",
        "\n\n",
        " don",
        "'",
        "T",
        "!!",
        "\n",
    ],
    "qwen2": [
        "It",
        "'s",
        " ",
        "2",
        "0",
        "2",
        "4",
        "5",
        " x",
        " ",
        " ",
        "¼",
        "²",
        "\n\n",
        " don",
        "'T",
        "!!\n",
    ],
    "llama-bpe": ["It", "'s", " ", "202", "45", " x", " ", " ", "¼²", "\n\n", " don", "'T", "!!\n"],
    "default": [
        "It",
        "'",
        "s",
        " ",
        "202",
        "45",
        " x",
        " ",
        " ",
        "¼²",
        "\n\n",
        " don",
        "'",
        "T",
        "!!",
        "\n",
    ],
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers(pre: str, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre=pre)
    offsets = tokenizer.backend.pre_tokenizer.pre_tokenize_str(SAMPLE)
    assert [SAMPLE[start:end] for _, (start, end) in offsets] == CUTS[pre]


def test_qwen_normalizes(tmp_path: Path) -> None:
    assert gguf_tokenizer(tmp_path, pre="qwen2").decode(
        gguf_tokenizer(tmp_path, pre="qwen2").encode("e\u0301")
    ) == ("\u00e9")


def test_qwen_files_without_pre(tmp_path: Path) -> None:
    config, weights = tiny_weights("qwen2", layers=1)
    path = tmp_path / "q.gguf"
    tiny_gguf(path, config, weights, metadata={"tokenizer.ggml.pre": None})
    tokenizer = read_gguf_tokenizer(GgufFile(path))
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("12")
    assert [piece for piece, _ in pieces] == ["1", "2"]


def by_score(text: str) -> list[str]:
    """SentencePiece's BPE: merge the neighbours whose union scores highest, leftmost first."""
    pieces, scores, _ = sentencepiece_vocabulary()
    table = dict(zip(pieces, scores, strict=True))
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(table.get(a + b), -i) for i, (a, b) in enumerate(pairwise(symbols))]
        best = max((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            return symbols
        at = -best[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(text=st.text("the cab x", max_size=25))
@settings(max_examples=300)
def test_sentencepiece_merges(text: str) -> None:
    pieces, scores, _ = sentencepiece_vocabulary()
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges_of_scores(vocabulary, scores)))
    assert backend.encode(text.replace(" ", "▁")).tokens == by_score(text)


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    pieces = lambda text: [tokenizer.piece(token) for token in tokenizer.encode(text)]  # noqa: E731
    assert pieces("the cat") == ["<s>", "▁the", "▁cat"]
    assert pieces("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces("<s>abc") == ["<s>", "<s>", "▁", "abc"]
    for text in ("the cat", " the  cat é🦶", "x"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    bare = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert [bare.piece(token) for token in bare.encode("the")] == ["th", "e"]
    assert bare.decode(bare.encode(" the")) == " the"


# -- The embedded model -------------------------------------------------------------------------


def test_smollm2_encodings(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|endoftext|><|im_end|>") == [0, 2]
    digits = tokenizer.encode("2024")
    assert [tokenizer.piece(token) for token in digits] == ["2", "0", "2", "4"]
    assert tokenizer.encode("user\nWhat is 17?") == [4093, 198, 1780, 314, 216, 33, 39, 47]
    assert tokenizer.token_bytes(tokenizer.encode(" hello")[0]) == b" hello"
    assert len(tokenizer.special_ids) == 17
    assert tokenizer.piece(10**6) == ""
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@given(text=TEXT)
@settings(max_examples=300)
def test_smollm2_is_the_published_tokenizer(smollm2: Any, text: str) -> None:
    """Cut as by the ``Digits`` and ``ByteLevel`` steps of the published tokenizer.json."""
    tokenizer = smollm2.tokenizer
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    ours = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert ours == cut.pre_tokenize_str(text)
    # The vocabulary lacks some bytes, those of control characters above all.
    if all(tokenizer.id_of(char) is not None for piece, _ in ours for char in piece):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# -- Incremental detokenization -----------------------------------------------------------------


def joined(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    stream = IncrementalDetokenizer(tokenizer, skip)
    return "".join([*(stream.push(token) for token in ids), stream.flush()])


@given(text=TEXT, noise=st.lists(st.integers(0, 600), max_size=12), skip=st.booleans())
@example(text="🦶", noise=[0, 131, 1], skip=True)
@settings(max_examples=400)
def test_byte_level_stream(smollm2: Any, text: str, noise: list[int], skip: bool) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(text)
    for sequence in (ids, ids + noise, noise + ids, ids[1:] + noise[:2] + ids[:-1]):
        assert joined(tokenizer, sequence, skip) == tokenizer.decode(sequence, skip)


def test_tokens_outside_the_byte_alphabet(tmp_path: Path) -> None:
    declared = {"288": {"content": "<| 🦶 |>", "special": False}}
    tokenizer = read_hf_tokenizer(write_tokenizer(tmp_path, added_tokens_decoder=declared))
    ids = tokenizer.encode("a<| 🦶 |>é")
    assert 288 in ids
    assert joined(tokenizer, ids, True) == tokenizer.decode(ids) == "a<| 🦶 |>é"
    assert tokenizer.token_bytes(288) == "<| 🦶 |>".encode()


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("spm"))


@given(text=TEXT, noise=st.lists(st.integers(0, 279), max_size=12), skip=st.booleans())
@example(text="  the cat", noise=[1, 3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF, 265], skip=False)
@example(text="", noise=[262, 262, 262], skip=True)
@settings(max_examples=400)
def test_sentencepiece_stream(spm: Tokenizer, text: str, noise: list[int], skip: bool) -> None:
    ids = spm.encode(text)
    for sequence in (ids, ids + noise, noise + ids, ids[1:] + noise[:2] + ids[:-1]):
        assert joined(spm, sequence, skip) == spm.decode(sequence, skip)


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse(), None],
    ids=["metaspace", "metaspace never", "fuse", "none"],
)
def test_other_decoders(decoder: Any) -> None:
    pieces = ["▁the", "▁▁cat", "▁", "s", "at▁", "é"]
    model = models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="s")
    backend = tokenizers.Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    for ids in ([0, 1, 2, 3, 4, 5], [2, 2, 3], [3, 0], [1] * 30, []):
        assert joined(tokenizer, ids, False) == tokenizer.decode(ids)


def test_text_appears_as_soon_as_it_is_certain(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    stream = IncrementalDetokenizer(tokenizer)
    pushed = [stream.push(token) for token in tokenizer.encode("Hi 🦶!")]
    assert pushed[0] == "Hi"
    assert "" in pushed and "\ufffd" not in "".join(pushed)
    assert pushed[-1] == "!"
    assert stream.flush() == ""
    cut = IncrementalDetokenizer(tokenizer)
    assert cut.push(tokenizer.encode("🦶")[0]) == ""
    assert cut.flush() == "\ufffd"


@pytest.mark.parametrize("known", [True, False], ids=["known", "any other"])
def test_pushing_takes_constant_time(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text is: counted in tokens that are decoded again."""
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    if not known:
        backend.decoder = decoders.Fuse()
    tokenizer, decoded = Tokenizer(backend), []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, *rest: decoded.append(len(ids)) or decode(ids, *rest)
    )
    stream, ids = IncrementalDetokenizer(tokenizer), tokenizer.encode("the cat") * 200
    text = "".join(stream.push(token) for token in ids) + stream.flush()
    assert max(decoded, default=0) <= 2 * WINDOW and bool(decoded) == (not known)
    assert text == decode(ids)
