"""Tokens that a request rules out: all but ``allowed_token_ids``, and those that would complete one
of ``bad_words``. Rules are followed like a grammar, beside the request's own if it has one: the
mask of a row is a function of the tokens before it, drafts included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from surefoot.errors import SurefootError
from surefoot.params import SamplingParams
from surefoot.structured import TextGrammar

if TYPE_CHECKING:
    from surefoot.models.loading.tokenizer import Tokenizer
    from surefoot.sampling.grammar import Grammars


def follow(
    params: SamplingParams,
    grammars: Grammars | None,
    vocab_size: int,
    ends: Sequence[int],
    leader: TextGrammar | None = None,
) -> TextGrammar | None:
    """What limits the tokens of a text before its first one; None: nothing does.

    ``ends``: the model's end tokens. ``leader``: what this returned for another text with the same
    parameters. Raises SurefootError for what cannot be followed."""
    grammar = None
    if params.structured_outputs is not None:
        if grammars is None:
            raise SurefootError("structured_outputs", "needs a tokenizer, this engine has none")
        grammar = grammars.start(params.structured_outputs)
    if params.allowed_token_ids is None and not params.bad_words:
        return grammar
    if isinstance(leader, RuledText):
        rules = leader.rules
    else:
        words = []
        if params.bad_words:
            if grammars is None:
                raise SurefootError("bad_words", "needs a tokenizer, this engine has none")
            words = word_tokens(grammars.tokenizer, params.bad_words)
        rules = TokenRules(vocab_size, params.allowed_token_ids, words)
    if grammar is None:
        stops = () if params.ignore_eos else ends
        early = {*stops, *(params.stop_token_ids or ())} if params.min_tokens else set()
        if not rules.leave_some(early):
            option = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
            beside = " before min_tokens" if early else ""
            raise SurefootError(
                option, f"there may be places{beside} where no token is left", "allow more"
            )
    return RuledText(rules, grammar, ends)


def word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The ways in which the tokenizer writes words: as they are, and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}") if bare else (word,):
            if tokens := tuple(tokenizer.encode(text, add_special_tokens=False)):
                found[tokens] = None
    return list(found)


class TokenRules:
    """What is allowed behind any text, and what certain tokens rule out next."""

    def __init__(
        self, vocab_size: int, allowed: Sequence[int] | None, words: Sequence[Sequence[int]]
    ) -> None:
        """``allowed`` None: all. ``words``: token sequences that the output must not have."""
        flags = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        flags[: vocab_size if allowed is None else 0] = True
        flags[list(allowed or ())] = True
        self._next: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        """By the last token before it: (all tokens before it, token)."""
        for *before, last in words:
            if before:
                self._next[before[-1]].append((tuple(before), last))
            else:
                flags[last] = False
        self._bits = np.packbits(flags, bitorder="little").view(np.uint32)
        self.reach = max((len(word) for word in words), default=1) - 1
        """How many tokens before it decide what a token may be."""
        flags[[word[-1] for word in words]] = False
        self._always = flags
        """Which tokens are allowed wherever they are."""

    def leave_some(self, without: Collection[int]) -> bool:
        """Whether some other token than ``without`` is allowed behind any text."""
        others = self._always.copy()
        others[list(without)] = False
        return bool(others.any())

    def forbidden(self, before: Sequence[int]) -> Iterator[int]:
        """What completes a word of several tokens behind ``before``."""
        for start, token in self._next.get(before[-1], ()) if before else ():
            if tuple(before[-len(start) :]) == start:
                yield token

    def allows(self, before: Sequence[int], token: int) -> bool:
        """Whether ``token`` may follow ``before``."""
        inside = bool(self._bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))
        return inside and token not in self.forbidden(before)

    def cut(self, before: Sequence[int], row: np.ndarray) -> None:
        """Clear what is ruled out behind ``before`` in int32 [words], as in ``TokenMasks``."""
        bits = row.view(np.uint32)
        bits &= self._bits
        for token in self.forbidden(before):
            bits[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))


class RuledText:
    """Where one text stands in its rules, and in its grammar; implements ``TextGrammar``. The end
    tokens of a text with a grammar are the grammar's business."""

    def __init__(self, rules: TokenRules, grammar: TextGrammar | None, ends: Sequence[int]) -> None:
        self.rules = rules
        self._grammar = grammar
        self._ends = frozenset(ends)
        self._text: list[int] = []
        """The end of the committed tokens, as far as the rules look back."""

    def restart(self) -> None:
        """See ``TextGrammar.restart``."""
        self._text = []
        if self._grammar is not None:
            self._grammar.restart()

    def sync(self, output: Sequence[int]) -> None:
        """See ``TextGrammar.sync``."""
        end = len(output)
        if self._grammar is not None:
            self._grammar.sync(output)
            # Behind an end token there is nothing that the rules could say anything of.
            end -= bool(output) and output[-1] in self._ends
        self._text = list(output[max(0, end - self.rules.reach) : end])

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        """See ``TextGrammar.allowed_prefix``."""
        grammar = self._grammar
        count = len(drafts) if grammar is None else grammar.allowed_prefix(drafts)
        for place, token in enumerate(drafts[:count]):
            if grammar is not None and token in self._ends:
                return place + 1
            if not self.rules.allows([*self._text, *drafts[:place]], token):
                return place
        return count

    def forced(self, most: int) -> tuple[list[int], list[float]]:
        """See ``TextGrammar.forced``: what the grammar forces; how the rules would have it cut into
        tokens is not looked for."""
        return ([], []) if self._grammar is None else self._grammar.forced(most)

    def write_masks(self, drafts: Sequence[int], bits: np.ndarray) -> None:
        """See ``TextGrammar.write_masks``."""
        if self._grammar is None:
            bits[:] = -1
        else:
            self._grammar.write_masks(drafts, bits)
        for place, row in enumerate(bits):
            if self._grammar is None:
                self.rules.cut([*self._text, *drafts[:place]], row)
                continue
            ends = _bits(self._ends, len(row)) & row
            self.rules.cut([*self._text, *drafts[:place]], row)
            row |= ends
            if not row.any():
                row[:] = _bits(self._ends, len(row))

    @property
    def accepting(self) -> bool:
        """See ``TextGrammar.accepting``."""
        return self._grammar is None or self._grammar.accepting

    @property
    def problem(self) -> str:
        """See ``TextGrammar.problem``."""
        if self._grammar is None or self._grammar.accepting:
            return ""
        return self._grammar.problem or "bad_words and allowed_token_ids leave no token that fits"


def _bits(tokens: Iterable[int], words: int) -> np.ndarray:
    """int32 [words]: only these are allowed."""
    flags = np.zeros(words * 32, dtype=bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
