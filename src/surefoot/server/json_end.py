"""Where a JSON object ends, in a text that grows."""

from __future__ import annotations

import re

_INSIDE = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of a JSON object in a text that grows. Only strings and brackets are looked
    at; ``closing`` outside of a string ends it, too, though it is not whole then."""

    def __init__(self, closing: str, depth: int = 0) -> None:
        self._closing = closing
        self._depth = depth
        self._in_string = False
        self._outside = re.compile(rf'["{{}}\[\]{re.escape(closing[:1])}]')
        self.ended = False
        self.whole = False

    def scan(self, text: str, at: int, final: bool) -> int:
        """The place up to which the text from ``at`` on belongs to the object for certain."""
        while at < len(text) and not self.ended:
            found = (_INSIDE if self._in_string else self._outside).search(text, at)
            if found is None:
                return len(text)
            place, letter, at = found.start(), found[0], found.end()
            if letter == '"':
                self._in_string = not self._in_string
            elif letter == "\\":
                if at == len(text) and not final:
                    return place
                at += 1
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                self.ended = self.whole = self._depth == 0
            elif text.startswith(self._closing, place):
                self.ended = True
                return place
            elif self._closing.startswith(text[place:]) and not final:
                return place
        return min(at, len(text))
