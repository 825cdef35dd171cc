"""The one error type that users meet: what was wrong, by the option's name, and what would work."""

from __future__ import annotations


class SurefootError(ValueError):
    """A request or a set-up that cannot be honoured.

    ``option`` is the name of the option, field or file that caused it, ``problem`` says what is
    wrong with it, and ``fix`` what would work instead. Each is one line, and so is ``str()``: what
    others wrote (names in files, messages of libraries) is put on one.
    """

    def __init__(self, option: str, problem: str, fix: str = "") -> None:
        self.option, self.problem, self.fix = (
            " ".join(text.splitlines()) for text in (option, problem, fix)
        )
        message = f"{self.option}: {self.problem}"
        super().__init__(f"{message}; {self.fix}" if fix else message)
