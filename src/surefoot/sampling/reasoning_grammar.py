"""Grammars of texts that may have free text, a model's reasoning, before what they are for."""

from __future__ import annotations

import json
from collections.abc import Sequence


def behind_reasoning(grammar: str, markers: Sequence[str | int], options: str) -> str:
    """The grammar of texts with reasoning before those of ``grammar``, see
    ``StructuredOutputsParams``. A marker is a text or a special token's id; ``options`` belong to
    every part of a grammar."""
    opening, closing = markers
    rules = [r"SPACE: /[ \n]{0,2}/", r"TEXT: /(.|\n)*/"]
    if isinstance(opening, int):
        before = f"<[{opening}]>"
    else:
        before = r"/[ \n]{0,2}/ " + json.dumps(opening, ensure_ascii=False) if opening else ""
    if isinstance(closing, int):
        rules.append(f"reasoning: {before} TEXT <[{closing}]>")
    elif isinstance(opening, int):
        rules += [f"reasoning: {before} thought", f"thought[lazy]: TEXT {json.dumps(closing)}"]
    else:
        # All of it one lexeme: what else may be free text cannot hide the first marker.
        rules.append(f"reasoning[lazy]: {before} TEXT {json.dumps(closing, ensure_ascii=False)}")
    start = "reasoning SPACE" if opening == "" else "(reasoning SPACE)?"
    first = "\n".join([f"start: {start} @rest", *rules]) + options
    parts = [{"lark_grammar": first}, {"name": "rest", "lark_grammar": grammar}]
    return json.dumps({"grammars": parts})
