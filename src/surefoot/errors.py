"""The one error type that users meet: what was wrong, by the option's name, and what would work."""

from __future__ import annotations


class SurefootError(ValueError):
    """A request or a set-up that cannot be honoured.

    ``option`` is the name of the option, field or file that caused it, ``problem`` says what is
    wrong with it, and ``fix`` what would work instead. ``str()`` is one line.
    """

    def __init__(self, option: str, problem: str, fix: str = "") -> None:
        self.option = option
        self.problem = problem
        self.fix = fix
        message = f"{option}: {problem}"
        super().__init__(f"{message}; {fix}" if fix else message)
