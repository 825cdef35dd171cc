"""Random grammars whose languages are finite and known by enumeration, and engines that follow
them: 48 tokens, some of several letters, so that one text can be made of many token sequences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from harness import VOCAB, Oracle, make_engine
from surefoot.engine.engine import Engine
from surefoot.kernels.rounds import RoundSpans
from surefoot.models.decoder import Decoder
from surefoot.request import Request, SamplingParams
from surefoot.sampling.grammar import Grammars
from surefoot.speculation import registry
from surefoot.speculation.proposer import Drafts

ENDS = (0, 1)
SHORT = [*'abc1{}":,é ', "ab", "bc", "abc", "aa", "11", "a1", "{}", '":', "cab"]
PIECES = ["<end>", "<stop>", *SHORT, *(f"x{number}" for number in range(20)), "\n"]
PIECES += [""] * (VOCAB - 2 - len(PIECES))
BYTES = [piece.encode() for piece in PIECES] + [b"\xc3", b"\xa9"]


class Pieces:
    """As much of a tokenizer as grammars need. The last two tokens are the halves of an é."""

    vocab_size = len(BYTES)
    special_ids = frozenset(ENDS)

    def token_bytes(self, token: int) -> bytes:
        return BYTES[token]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Of ``word``s; other texts greedily, without what the vocabulary lacks."""
        mark, _, ids = text.strip().partition(":")
        if mark == "word":
            return [int(token) for token in ids.split(",")]
        data, found = text.encode(), []
        while data:
            known = [
                token for token in range(2, VOCAB) if BYTES[token] and data.startswith(BYTES[token])
            ]
            if known:
                found.append(max(known, key=lambda token: len(BYTES[token])))
            data = data[len(BYTES[found[-1]]) if known else 1 :]
        return found


def word(*tokens: int) -> str:
    """A text that is written with these tokens."""
    return f"word:{','.join(map(str, tokens))}"


def check_rules(request: Request) -> None:
    """By the definitions of ``bad_words`` and ``allowed_token_ids``; of ends without a grammar."""
    params, output = request.params, request.output
    exempt = ENDS if params.structured_outputs is not None else ()
    if params.allowed_token_ids is not None:
        assert {*output} <= {*params.allowed_token_ids, *exempt}
    for text in params.bad_words or ():
        bad = Pieces().encode(text)
        places = range(len(output) - len(bad) + 1)
        found = [at for at in places if output[at : at + len(bad)] == bad and bad[-1] not in exempt]
        assert not found, f"{bad} in {output}"


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(BYTES[token] for token in tokens if token not in ENDS)


def grammars() -> Grammars:
    tokenizer: Any = Pieces()
    return Grammars(tokenizer, VOCAB, ENDS)


def structured_engine(decoder: Decoder, **options: Any) -> Engine:
    engine = make_engine(decoder, **options)
    engine.grammars = grammars()
    return engine


@dataclass(frozen=True)
class Language:
    """A regex and every text that it matches."""

    regex: str
    texts: frozenset[bytes]

    def viable(self, prefix: bytes) -> bool:
        """Whether some text begins so."""
        return any(text.startswith(prefix) for text in self.texts)

    def allowed(self, output: Sequence[int]) -> set[int]:
        """The tokens that may follow ``output``, by trying them all."""
        text = text_of(output)
        found = {
            token
            for token in range(VOCAB)
            if token not in ENDS and BYTES[token] and self.viable(text + BYTES[token])
        }
        return found | set(ENDS) if text in self.texts else found

    def matches(self, text: bytes) -> bool:
        """By Python's own regular expressions."""
        return re.fullmatch(self.regex, text.decode("utf-8", "surrogateescape")) is not None


def _texts(items: Sequence[frozenset[bytes]]) -> frozenset[bytes]:
    return frozenset(b"".join(parts) for parts in itertools.product(*items))


LETTERS = list('abc1{}":,é ')
_MOST = 150


def _letter(letter: str) -> Language:
    return Language(re.escape(letter), frozenset({letter.encode()}))


def _sequence(parts: list[Language]) -> Language:
    return Language("".join(p.regex for p in parts), _texts([p.texts for p in parts]))


def _either(parts: list[Language]) -> Language:
    regex = "(" + "|".join(part.regex for part in parts) + ")"
    return Language(regex, frozenset().union(*(part.texts for part in parts)))


def _repeated(part: Language, low: int, more: int) -> Language:
    texts = [_texts([part.texts] * count) for count in range(low, low + more + 1)]
    return Language(f"({part.regex}){{{low},{low + more}}}", frozenset().union(*texts))


languages = st.recursive(
    st.sampled_from(LETTERS).map(_letter),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(_sequence),
        st.lists(inner, min_size=2, max_size=3).map(_either),
        st.builds(_repeated, inner, st.integers(0, 2), st.integers(0, 2)),
    ),
    max_leaves=8,
).filter(lambda language: len(language.texts) <= _MOST and language.texts != {b""})


_chunk = st.text(alphabet="abc1", min_size=1, max_size=3)
# Texts of up to 40 letters in a few variants, which tokens of one to three letters make up in very
# many ways: drafts that are allowed and wrong, and requests that live long enough to be preempted.
long_languages = st.builds(
    lambda parts, forks: _sequence(
        [Language(chunk, frozenset({chunk.encode()})) for chunk in parts]
        + [
            _either([Language(chunk, frozenset({chunk.encode()})) for chunk in fork])
            for fork in forks
        ]
        + [Language(chunk, frozenset({chunk.encode()})) for chunk in reversed(parts)]
    ),
    st.lists(_chunk, min_size=4, max_size=9),
    st.lists(st.lists(_chunk, min_size=2, max_size=2), max_size=6),
)


@st.composite
def structures(draw: st.DrawFn) -> tuple[dict[str, Any], Language]:
    """``structured_outputs``, and its language."""
    language = draw(st.one_of(languages, long_languages, long_languages))
    texts = sorted(text.decode() for text in language.texts if text)
    if draw(st.integers(0, 3)):
        return {"regex": language.regex}, language
    choice = draw(st.lists(st.sampled_from(texts), min_size=1, max_size=6, unique=True))
    regex = "|".join(re.escape(text) for text in choice)
    return {"choice": choice}, Language(regex, frozenset(text.encode() for text in choice))


class Meddler(Oracle):
    """Knows the text and spoils a draft here and there: right and wrong ones at every place of a
    span, some of the wrong ones allowed by the grammar."""

    name = "meddler"

    def propose(self, slots: torch.Tensor) -> Drafts:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(5)
        drafts = super().propose(slots)
        spoilt = torch.rand(drafts.tokens.shape, generator=self.generator) < 0.35
        picks = torch.randint(0, 60, drafts.tokens.shape, generator=self.generator)
        # A token that begins with the same letter: another way to write what is right, often.
        others = drafts.tokens.clone()
        for place, token in enumerate(drafts.tokens.flatten().tolist()):
            alike = [t for t in range(VOCAB) if BYTES[t][:1] == BYTES[token][:1] and t != token]
            if alike:
                others.view(-1)[place] = alike[int(picks.flatten()[place]) % len(alike)]
        tokens = torch.where(spoilt, others, drafts.tokens)
        return Drafts(tokens, drafts.lengths, drafts.confidence)


registry.register(Meddler)


def watch_drafts(engine: Engine, wanted: dict[int, Language]) -> list[int]:
    """Assert for every round that each verified draft is one that its request's language allows;
    ``wanted`` is by seed. Returns a list to which each round adds its verified drafts."""
    judge, verified = engine.round.judge, []

    def watching(spans: RoundSpans, *rest: Any) -> Any:
        total, state = 0, engine.state
        for slot, count in zip(spans.slots.tolist(), spans.drafts.tolist(), strict=True):
            if not count:
                continue
            [request] = [r for r in engine.scheduler.running if r.slot == slot]
            if request.seed not in wanted:
                continue
            length = int(state.length[slot])
            drafts = state.history[slot, length : length + count].tolist()
            assert length == request.length, "the host knows the text of a request with a grammar"
            language = wanted[request.seed]
            for place, draft in enumerate(drafts):
                known = [*request.output, *drafts[:place]]
                assert not set(known) & set(ENDS), "a draft behind an end"
                assert draft in language.allowed(known), "a forbidden draft was verified"
            total += count
        verified.append(total)
        return judge(spans, *rest)

    engine.round.judge = watching  # type: ignore[method-assign]
    return verified


def params_with(structure: dict[str, Any], **values: Any) -> SamplingParams:
    return SamplingParams.from_dict({**values, "structured_outputs": structure})
