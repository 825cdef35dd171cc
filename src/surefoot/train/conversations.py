"""One document in the making: what the user says is given, every answer is the target's.

A later turn is appended to the ids that are there: what the target wrote is never tokenised again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.request import SamplingParams
from surefoot.train import openings
from surefoot.train.filters import (
    MOST_REPEATED,
    answer_key,
    before_loop,
    prompt_key,
    repeated_share,
)
from surefoot.train.shards import Document

if TYPE_CHECKING:
    from surefoot.engine.llm import LLM
    from surefoot.train.generate import DataOptions

Messages = Sequence[Mapping[str, Any]]
_MARK = "surefoot marks the answer"
_TURN_TOKENS = 256
"""Most of a user's turn that the target writes."""
_TURN_TEMPERATURES = (0.6, 0.8)
"""No other filter: finding the likeliest tokens of a share takes a GPU longer."""
_TURN_WORDS = 24
"""Two of these that begin with as many equal words are one."""


@dataclass(frozen=True)
class Asked:
    """``messages`` up to the first answer go through the chat template; without, ``text`` is
    completed as it is."""

    text: str
    key: int
    """Equal for prompts that count as one (``filters.prompt_key``)."""
    messages: Messages | None = None
    later: tuple[str, ...] = ()
    """What the user says after each answer."""


class Conversation:
    """Asks for one text after the other: ``request`` says what for, ``take`` is given it."""

    def __init__(
        self,
        llm: LLM,
        options: DataOptions,
        chooser: random.Random,
        asked: Asked | None,
        found: Sequence[tuple[float, list[int]]],
    ) -> None:
        """``asked`` None: the target writes the user's first turn too, after one of the openings
        ``found``."""
        self.llm, self.options, self.chooser = llm, options, chooser
        self.asked = asked
        self.by_target = asked is None
        self.dropped: str | None = None
        """Why nothing is left of it."""
        greedy = chooser.random() < options.greedy
        self.temperature = 0.0 if greedy else chooser.choice(options.temperatures)
        self._openings = found
        self._ids: list[int] = []
        self._answers: list[tuple[int, int]] = []
        self._ended = False

    def request(self) -> tuple[list[int], SamplingParams] | None:
        """(prompt's token ids, parameters) of the next text; None: it is over."""
        if self.dropped is not None or self._ended:
            return None
        if self.asked is None:
            ids = openings.choose(list(self._openings), self.chooser)
            most, temperature = _TURN_TOKENS, self.chooser.choice(_TURN_TEMPERATURES)
            most = max(1, min(most, self.llm.room(ids)))
        else:
            ids = self._ids = self._ids or self._first(self.asked)
            most, temperature = self.options.max_tokens, self.temperature
            if len(ids) > self.options.max_prompt or self.llm.room(ids) < most:
                self._ended = True
                self.dropped = None if self._answers else "long prompt"
                return None
        seed = self.chooser.getrandbits(62)
        return ids, SamplingParams(temperature=temperature, max_tokens=most, seed=seed)

    def take(self, text: Sequence[int]) -> None:
        """The text that was asked for."""
        if self.asked is None:
            self._take_turn(text)
            return
        if repeated_share(text) > MOST_REPEATED:
            # What led to the loop is worth learning, the loop is too easy.
            text = before_loop(text)
            self._ended = True
        first = len(self._ids)
        self._ids = [*self._ids, *text]
        self._answers.append((first, len(self._ids)))
        later = self.asked.later[len(self._answers) - 1 : len(self._answers)]
        if not later or not self._append(later[0]):
            self._ended = True

    def document(self) -> Document:
        """What there is, ending with the last answer."""
        assert self.asked is not None and self._answers
        ids = self._ids[: self._answers[-1][1]]
        written = [token for first, end in self._answers for token in ids[first:end]]
        keys = self.asked.key, answer_key(written)
        return Document(ids, tuple(self._answers), self.temperature, keys)

    def _first(self, asked: Asked) -> list[int]:
        if asked.messages is not None:
            return self.llm.render_chat(asked.messages)
        return self.llm.tokenizer.encode(asked.text, add_special_tokens=True)

    def _take_turn(self, ids: Sequence[int]) -> None:
        """The user's turn, by the target."""
        text = self.llm.tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0].strip()
        if not text:
            self.dropped = "empty prompt"
            return
        messages = [{"role": "user", "content": text}]
        if len(self._openings) > 1 and self.chooser.random() < openings.SYSTEM_SHARE:
            system = self.chooser.choice(openings.SYSTEMS)
            messages.insert(0, {"role": "system", "content": system})
        self.asked = Asked(text, prompt_key(text, _TURN_WORDS), messages)

    def _append(self, turn: str) -> bool:
        """What the template puts between the answer and the next one; False if it cannot be told,
        as the template does not show the answer as it is."""
        messages = [
            {"role": "user", "content": _MARK.title()},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": turn},
        ]
        _, found, between = self.llm.tokenizer.render_chat(messages).partition(_MARK)
        if not found:
            return False
        ids = self.llm.tokenizer.encode(between, add_special_tokens=False)
        # The target may have ended its answer itself.
        self._ids += ids[1:] if ids[:1] == self._ids[-1:] else ids
        return True
