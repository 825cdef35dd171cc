"""Methods that leave their object whole, whatever they raise."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound="Restored")


class Restored(ABC):
    """Has methods that are ``whole``: where one was broken off, ``restore`` is called, at once, and
    if that was broken off as well (somebody presses Ctrl-C twice), before the next one begins."""

    torn = False
    """Whether a method was begun and not ended. They do not call each other."""

    @abstractmethod
    def restore(self) -> None:
        """Make everything right again, whatever state it is in."""


def whole(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """A method after which its object is right, even if it raises."""

    @functools.wraps(method)
    def wrapped(owner: Owner, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        if owner.torn:
            owner.restore()
        owner.torn = True
        try:
            result = method(owner, *args, **options)
        except BaseException:
            owner.restore()
            owner.torn = False
            raise
        owner.torn = False
        return result

    return wrapped
