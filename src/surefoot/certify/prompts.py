"""Prompts of a certificate where the user gives none: texts of several kinds, and patterns of
token ids that need no tokenizer."""

from __future__ import annotations

from random import Random

from surefoot.models.loading.tokenizer import Tokenizer

PATTERNS = 8
MAX_TOKENS = 64
TEXTS = (
    "Rename the variable in this code and change nothing else:\n\n"
    "total = 0\nfor price in prices:\n    total = total + price\nprint(total)\n\n"
    "sum_prices = 0\nfor price in prices:\n",
    "one two three four five six seven eight nine ten\n"
    "one two three four five six seven eight nine ten\none two three",
    "The lighthouse keeper wrote one line in the log every night. That night she wrote",
    '{"id": 1, "name": "Ada", "active": true}\n{"id": 2, "name": "Ben", "active": false}\n{"id":',
    "Question: Which is heavier, a kilogram of feathers or a kilogram of iron?\nAnswer:",
    "To be sure of a thing is to have tried to break it. To be sure of a thing is",
    "| city | country |\n| --- | --- |\n| Paris | France |\n| Rome | Italy |\n| Madrid |",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
)


def default_prompts(
    vocab_size: int, max_positions: int, tokenizer: Tokenizer | None = None
) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt, none longer than a third of the context."""
    limit = min(MAX_TOKENS, max_positions // 3)
    prompts = [] if tokenizer is None else [tokenizer.encode(text) for text in TEXTS]
    random = Random(3)
    for index in range(PATTERNS if tokenizer is not None else 2 * PATTERNS):
        # Ids from a small part of the vocabulary, repeated: the next ones can be looked up.
        low = random.randrange(max(1, vocab_size - 64))
        piece = [low + random.randrange(min(64, vocab_size - low)) for _ in range(3 + index)]
        times = 1 if index % 4 == 3 else 4
        prompts.append(piece * times)
    return tuple(tuple(prompt[:limit]) for prompt in prompts if prompt)
