"""Grammars over token ids: compiled once per text of a grammar, followed once per request.

Compiling and masks are llguidance's (https://github.com/guidance-ai/llguidance). A token is
allowed exactly if the text so far with the token's bytes behind it can still become a text of the
grammar, however the text would be tokenised otherwise; an end token exactly if the text is one
already. So the mask of a row is a pure function of the tokens before it.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version

from surefoot.errors import SurefootError
from surefoot.sampling.forced import REACH, Ahead, Cutter, confidences
from surefoot.sampling.reasoning_grammar import behind_reasoning
from surefoot.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from surefoot.models.loading.tokenizer import Tokenizer

_LEAST = 1, 7
"""A version of llguidance. Older ones' tokenizers take no more than one end token."""
CACHED_GRAMMARS = 64
MAX_LEXER_STATES = 50_000
"""Of one grammar, at 1 to 2 kB each; a text that needs more ends there."""
_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
MAX_ROW_ITEMS = 5_000
"""An object with n optional members takes about 4 n. It bounds what a mask can cost a round."""
MAX_SYMBOLS = 20_000
"""In a grammar's rules; an object with as many optional members as a row has room for has 15,000.
Compiling takes time that grows with the square."""
MAX_MASK_SECONDS = 0.05
"""Of a processor, for one row's mask: the round waits for it, and with it everybody."""
WHITE_SPACE = r" |\n{1,2}[ \t]{0,32}"
"""Between two tokens of JSON, unless a request says otherwise: without a bound, small models fill
their texts with line breaks."""
# Without it, a mask holds only the one way in which the tokenizer would cut text that is certain.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_BYTES_OF_TOKEN = 8
"""As many forced bytes as can be of use, for each draft."""
MAX_FORCED_SECONDS = 0.005
"""Of a processor, for what is forced at one place: usually some tens of microseconds."""
MOST_SLOW_PLACES = 2
"""Of a text, that take longer: the first of an engine may, but a text with more of them goes on
without such drafts."""
# Where a library's message shows the grammar and points into it.
_DRAWING = re.compile(r"\s*(\d+ \||\^|<state>|<non-verbose/>).*")
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class Grammars:
    """Compiles grammars for one tokenizer; the latest are kept. Safe to call from any thread.

    ``vocab_size`` counts the model's logits; ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_tokens = tuple(end_tokens)
        self._lock = threading.Lock()
        # Its own: reading a large vocabulary takes a second, and nobody waits for it in ``knows``.
        self._loading = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._cutter: Cutter | None = None

    def knows(self, wanted: StructuredOutputsParams) -> bool:
        """Whether ``start`` has nothing to compile."""
        with self._lock:
            return wanted in self._compiled

    def start(self, wanted: StructuredOutputsParams) -> GrammarState:
        """The state before a text's first token. Raises SurefootError for what is no grammar, or
        one that cannot be honoured."""
        with self._lock:
            compiled = self._compiled.get(wanted)
            if compiled is not None:
                self._compiled.move_to_end(wanted)
        if compiled is None:
            compiled = self._compile(wanted)
            with self._lock:
                self._compiled[wanted] = compiled
                if len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return self._state(compiled)

    def _compile(self, wanted: StructuredOutputsParams) -> Any:
        if not self.end_tokens:
            raise SurefootError(
                "structured_outputs", "needs an end token, which this model does not name"
            )
        library = _library()
        try:
            grammar = grammar_text(wanted)
            if wanted.reasoning is not None:
                grammar = behind_reasoning(grammar, self._markers(wanted.reasoning), NO_FORCING)
        except ValueError as error:
            raise SurefootError(wanted.option, _one_line(str(error))) from None
        limits = library.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_items_in_row=MAX_ROW_ITEMS,
            max_grammar_size=MAX_SYMBOLS,
            verbose_errors=False,
        )
        matcher = library.LLMatcher(
            self._load_vocabulary(library), grammar, log_level=0, limits=limits
        )
        state = self._state(matcher)
        problem = matcher.get_error() or state.problem
        if problem:
            problem = _one_line(problem)
            if wanted.kind != "grammar":
                # The place is one in what was made of it.
                problem = _PLACE.sub("", problem)
            raise SurefootError(wanted.option, problem)
        return matcher

    def _state(self, start: Any) -> GrammarState:
        assert self._cutter is not None, "the vocabulary was loaded to compile"
        return GrammarState(start, self.end_tokens, self._cutter)

    def _markers(self, texts: Sequence[str]) -> list[str | int]:
        """Ids of those that are special tokens."""
        ids = [self.tokenizer.id_of(text) for text in texts]
        special = self.tokenizer.special_ids
        return [i if i in special else text for i, text in zip(ids, texts, strict=True)]

    def _load_vocabulary(self, library: Any) -> Any:
        with self._loading:
            if self._vocabulary is None:
                vocabulary = _Vocabulary(self.tokenizer, self.end_tokens)
                self._cutter = Cutter(self.tokenizer, vocabulary.tokens, self.vocab_size)
                wrapper = library.TokenizerWrapper(vocabulary)
                self._vocabulary = library.LLTokenizer(
                    wrapper, n_vocab=self.vocab_size, eos_token=list(self.end_tokens)
                )
            return self._vocabulary


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """In llguidance's own notation. ValueError for what is none."""
    library = _library()
    if wanted.kind in ("json", "json_object"):
        schema: dict[str, Any] = json.loads(str(wanted.json)) if wanted.json else {"type": "object"}
        schema["x-guidance"] = _json_options(schema.get("x-guidance", {}), wanted)
        return f"start: %json {json.dumps(schema)}{NO_FORCING}"
    if wanted.kind == "regex":
        [part] = json.loads(library.grammar_from("regex", wanted.regex))["grammars"]
        return part["lark_grammar"] + NO_FORCING
    if wanted.kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice or ())
        return f"start: {' | '.join(texts)}{NO_FORCING}"
    return library.grammar_from("grammar", wanted.grammar) + NO_FORCING


def _json_options(given: Any, wanted: StructuredOutputsParams) -> Any:
    """llguidance's options for a schema that has ``given`` as its own."""
    if not isinstance(given, Mapping):
        return given  # The library says what is wrong with it.
    if wanted.disable_any_whitespace:
        kept = {name: value for name, value in given.items() if name != "whitespace_pattern"}
        return {**kept, "whitespace_flexible": False}
    if "whitespace_flexible" in given or "whitespace_pattern" in given:
        return given
    return {**given, "whitespace_pattern": WHITE_SPACE}


def missing_package() -> str | None:
    """What structured output lacks here, as the problem of whoever wants it; None: nothing."""
    try:
        found = importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return "needs the package llguidance, which is not installed"
    if Version(found).release < _LEAST:
        least = ".".join(map(str, _LEAST))
        return f"needs the package llguidance of version {least} or later; {found} is installed"
    return None


def _library() -> Any:
    if (problem := missing_package()) is not None:
        raise SurefootError("structured_outputs", problem, "install surefoot[structured]")
    try:
        import llguidance
    except ImportError as error:
        problem = f"needs the package llguidance, which cannot be imported: {error}"
        raise SurefootError("structured_outputs", problem, "install it anew") from None
    return llguidance


def _one_line(message: str) -> str:
    """A library's message without its drawing of the place."""
    lines = [line for line in message.splitlines() if not _DRAWING.fullmatch(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= 400 else text[:400] + " ..."


class _Vocabulary:
    """The tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.eos_token_id = end_tokens[0]
        self.bos_token_id = None
        special = {*tokenizer.special_ids, *end_tokens}
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return self._tokenizer.encode(text, add_special_tokens=False)


class GrammarState:
    """Where one text stands in its grammar; implements ``structured.TextGrammar``.

    A text that cannot go on, because the vocabulary lacks the bytes or the library gives up, may
    only end; ``accepting`` is then false. So does one whose masks take too long.
    """

    def __init__(self, start: Any, end_tokens: Sequence[int], cutter: Cutter) -> None:
        """``start``: the library's matcher before any text; it is copied, not moved."""
        self._start = start
        self._ends = list(end_tokens)
        self._cutter = cutter
        self._slow = False
        self._slow_places = 0
        self.restart()

    def restart(self) -> None:
        """See ``TextGrammar.restart``."""
        self._matcher = self._start.deep_copy()
        self._followed = 0
        self._text: list[int] = []
        """What ``_matcher`` was given."""
        self._tail = b""
        """The end of it, as text."""

    def sync(self, output: Sequence[int]) -> None:
        """See ``TextGrammar.sync``. End tokens end the text, so nothing follows them."""
        new = list(output[self._followed :])
        self._followed = len(output)
        text = self._before_end(new)
        if text:
            # A token that is not allowed leaves an error: from there, the text may only end.
            self._matcher.consume_tokens(text)
            self._text += text
            pieces = self._cutter.pieces
            self._tail = (self._tail + b"".join(pieces[token] for token in text))[-REACH:]

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        """See ``TextGrammar.allowed_prefix``."""
        text = self._before_end(drafts)
        count = self._matcher.validate_tokens(text) if text else 0
        if count == len(text) < len(drafts):
            self._matcher.consume_tokens(text)
            count += self.accepting
            self._go_back(len(text))
        return count

    def write_masks(self, drafts: Sequence[int], bits: np.ndarray) -> None:
        """See ``TextGrammar.write_masks``. Rows behind an end token allow end tokens only."""
        text = self._before_end(drafts)
        # Of all rows at once what need not be done for each: they are a round's, and few.
        rows = 1 + len(text)
        may_end = self._compute_masks(text, bits[:rows])
        bits[rows:] = 0
        for token in self._ends:
            bits[:rows, token // 32] &= ~_BITS[token % 32]
        ending = np.bitwise_or.reduce(bits, axis=1) == 0
        ending[:rows] |= may_end
        for token in self._ends:
            bits[ending, token // 32] |= _BITS[token % 32]

    def _compute_masks(self, text: Sequence[int], bits: np.ndarray) -> list[bool]:
        """The library's masks of the rows before, between and behind these tokens, and where the
        text may end."""
        matcher, may_end = self._matcher, []
        place, (size, _) = bits.ctypes.data, bits.strides
        began = time.thread_time()
        for row in range(len(bits)):
            if row:
                matcher.consume_token(text[row - 1])
            if self._slow:
                bits[row] = 0
            else:
                matcher.unsafe_compute_mask_ptr(place + row * size, size)
                ended = time.thread_time()
                self._slow = ended - began > MAX_MASK_SECONDS
                began = ended
            may_end.append(matcher.is_accepting())
        if text:
            self._go_back(len(text))
        return may_end

    def forced(self, most: int) -> tuple[list[int], list[float]]:
        """See ``TextGrammar.forced``."""
        if self._slow_places > MOST_SLOW_PLACES:
            return [], []
        began = time.thread_time()
        ahead = Ahead(self._matcher, self._cutter.letters, self._tail)
        ahead.look(_BYTES_OF_TOKEN * most)
        if ahead.consumed:
            self._go_back(ahead.consumed)
        text, tokens = ahead.text, []
        if text:
            tokens = self._cutter.cut(self._text[-1] if self._text else None, text)[:most]
        self._slow_places += time.thread_time() - began > MAX_FORCED_SECONDS
        sizes = [len(self._cutter.pieces[token]) for token in tokens]
        return tokens, confidences(sizes, ahead.guesses, len(text))

    def _go_back(self, drafts: int) -> None:
        """Forget so many tokens that were only tried."""
        if not self._matcher.is_error():
            self._matcher.rollback(drafts)
            return
        # A draft after which nothing fits stops the library for good, roll back or not.
        self._matcher = self._start.deep_copy()
        if self._text:
            self._matcher.consume_tokens(self._text)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        ends = [index for index, token in enumerate(tokens) if token in self._ends]
        return list(tokens[: ends[0]] if ends else tokens)

    @property
    def accepting(self) -> bool:
        """See ``TextGrammar.accepting``."""
        return self._matcher.is_accepting()

    @property
    def problem(self) -> str:
        """See ``TextGrammar.problem``."""
        if self._slow:
            return f"what may follow takes over {1000 * MAX_MASK_SECONDS:.0f} ms to tell"
        if self.accepting or not self._stuck():
            return ""
        problem = _one_line(self._matcher.get_error())
        if not problem or problem.startswith("NoExtension"):
            return "no token of the vocabulary fits here"
        return problem

    def _stuck(self) -> bool:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32).copy()
        for token in self._ends:
            bits[token // 32] &= ~_BITS[token % 32]
        return not bits.any()
