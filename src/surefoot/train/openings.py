"""Prompts from nothing: the target writes the user's turn itself (Magpie, Xu et al., 2024).

An instruction-tuned model that is given its chat template up to where the user speaks goes on as a
user would. A system text before it says what about; the answer is then asked for without it.
"""

from __future__ import annotations

import random

from surefoot.errors import SurefootError
from surefoot.models.loading.tokenizer import Tokenizer

_MARK = "surefoot marks the user turn"
TOPICS: tuple[tuple[float, str | None], ...] = (
    (0.40, None),
    (0.08, "The user asks for a letter, a story, a poem or another text to be written."),
    (0.08, "The user gives a passage of text and asks for a summary or for facts from it."),
    (0.08, "The user asks questions about history, science, geography and everyday life."),
    (0.06, "The user asks for advice about work, health, travel, cooking or money."),
    (0.12, "The user asks a programmer to write, explain or correct code."),
    (0.10, "The user asks for help with arithmetic and word problems, step by step."),
    (0.08, "The user asks for a translation between two languages."),
)
"""(share of the prompts, the system text that leads to them; None: the template's own)."""
SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You are an expert. Explain in full.")
SYSTEM_SHARE = 0.1
"""Of the answers given under another system text than the template's own."""


def opening(tokenizer: Tokenizer, system: str | None) -> list[int]:
    """Token ids of the template up to the user's first word, under a system text. Raises
    SurefootError about ``prompts`` where there is no template, or where it changes what the user
    says."""
    if tokenizer.chat_template is None:
        raise SurefootError(
            "prompts", "are needed: the target has no chat template to write them from"
        )
    messages = [{"role": "user", "content": _MARK}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.render_chat(messages)
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise SurefootError(
            "prompts", "are needed: the target's chat template does not show where the user speaks"
        )
    return tokenizer.encode(before, add_special_tokens=False)


def openings(tokenizer: Tokenizer) -> list[tuple[float, list[int]]]:
    """One for each of ``TOPICS``, with its share; templates without a system role leave those
    out."""
    found = [(TOPICS[0][0], opening(tokenizer, None))]
    for share, system in TOPICS[1:]:
        try:
            found.append((share, opening(tokenizer, system)))
        except SurefootError:
            return found[:1]
    return found


def choose(found: list[tuple[float, list[int]]], chooser: random.Random) -> list[int]:
    weights = [share for share, _ in found]
    return chooser.choices([item for _, item in found], weights)[0]
