"""Text to token ids and back, and a conversation to its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError
from surefoot.models.loading.chat_template import render_chat_template, template_variables
from surefoot.models.loading.detokenizer import piece_bytes, stream_for
from surefoot.models.loading.token_lengths import TokenLengths, token_lengths

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class TokenizerSettings:
    """What a checkpoint says about its tokenizer beside the tokenizer itself."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token``, ... -> text, as chat templates read them."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; the usual one is ``default``."""


@contextmanager
def tokenizer_errors(option: str, problem: str) -> Iterator[None]:
    """Whatever the ``tokenizers`` library raises becomes a SurefootError about ``option``: bare
    Exceptions, and panics of its Rust code, which are BaseExceptions."""
    try:
        yield
    except SurefootError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        detail = " ".join(str(error).split())[:200]
        raise SurefootError(option, f"{problem}: {detail}") from error


class Tokenizer:
    """A ``tokenizers`` tokenizer with the settings of its checkpoint.

    Ids are those of the model's embedding rows. Truncation and padding that a file may ask for
    are switched off.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: TokenizerSettings | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.settings = settings or TokenizerSettings()

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Ids of ``text``. Special tokens written in it (``<|im_start|>``) are parsed as such;
        ``add_special_tokens`` adds what the tokenizer puts around a text (a BOS, usually). Raises
        SurefootError for a text that the tokenizer cannot take, or of more than ``most`` tokens."""
        with tokenizer_errors("prompt", "the model's tokenizer failed on it"):
            # ``encode`` keeps the interpreter's lock, a second for every 2 MB.
            [found] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            if most is not None and len(found) > most:
                problem = f"has {len(found)} tokens, more than {most}, the most there is room for"
                raise SurefootError("prompt", problem, "shorten it")
            return found.ids

    @cached_property
    def lengths(self) -> TokenLengths | None:
        """What a text's length tells of its tokens; None where it tells nothing."""
        return token_lengths(self.backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``, invalid UTF-8 replaced by U+FFFD. Spaces are not cleaned up."""
        with tokenizer_errors("model", "its tokenizer failed on token ids"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(
        self, texts: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """``decode`` of several texts, on all processors."""
        if not texts:
            return []
        with tokenizer_errors("model", "its tokenizer failed on token ids"):
            return self.backend.decode_batch(
                list(map(list, texts)), skip_special_tokens=skip_special_tokens
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def id_of(self, piece: str) -> int | None:
        """Id of a vocabulary entry, exactly as stored; None when there is none."""
        return self.backend.token_to_id(piece)

    def piece(self, token: int) -> str:
        """The vocabulary entry of an id, exactly as stored; "" for an id without one."""
        return self.backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for within a text; b"" for an id without an entry."""
        return piece_bytes(self.decoder_json, self.piece(token))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self._special_id("pad_token")

    def _special_id(self, name: str) -> int | None:
        text = self.settings.special_tokens.get(name)
        return None if text is None else self.id_of(text)

    @property
    def chat_template(self) -> str | None:
        """The usual chat template; None for a model without one."""
        return self.settings.templates.get("default")

    def add_chat_templates(self, templates: Mapping[str, str]) -> None:
        """Templates by name, where it has none of that name itself."""
        templates = {**templates, **self.settings.templates}
        self.settings = replace(self.settings, templates=templates)

    def replace_chat_template(self, template: str) -> None:
        """Render conversations with this one, tools or not."""
        self.settings = replace(self.settings, templates={"default": template})

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, to be encoded with ``add_special_tokens=False``.

        ``chat_template`` replaces the model's own; ``variables`` reach the template
        (``enable_thinking`` ...). Raises SurefootError when there is no template or it refuses.
        """
        templates = self.settings.templates
        template = chat_template or (templates.get("tool_use") if tools else None)
        template = template or templates.get("default")
        if template is None:
            raise SurefootError(
                "messages",
                "this model has no chat template",
                "use a plain prompt, an instruction-tuned model, or give a chat template",
            )
        if tools and "tools" not in template_variables(template):
            raise SurefootError("tools", "this model's chat template takes none", "drop them")
        return render_chat_template(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.settings.special_tokens, **variables},
        )

    @cached_property
    def decoder_json(self) -> Mapping[str, Any] | None:
        """The decoder's description in tokenizer.json; None without a decoder."""
        decoder = self.backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())


class IncrementalDetokenizer:
    """Text of a sequence as it grows.

    The strings that ``push`` and a last ``flush`` return join to exactly
    ``tokenizer.decode(all ids, skip_special_tokens)``: a character split over tokens waits until
    it is whole. A ``push`` takes constant time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """``shown``: ids that are not skipped though they are special."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._stream = stream_for(tokenizer.decoder_json, tokenizer.decode)

    def push(self, token: int) -> str:
        """Take the next id; return the text that is now certain, "" for none."""
        piece = "" if token in self._skipped else self._tokenizer.piece(token)
        return self._stream.push(token, piece) if piece else ""

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        return self._stream.flush()
