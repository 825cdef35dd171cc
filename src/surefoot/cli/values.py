"""Values of options that are written in a way of their own."""

from __future__ import annotations

import json
from typing import Any

from surefoot.errors import SurefootError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def read_size(text: str, option: str = "kv_cache_memory") -> int:
    """``1048576``, ``512MiB`` or ``1.5 GiB`` in bytes. ``option`` is named in errors."""
    number = text.rstrip("KMGiBkmgb ")
    unit = text[len(number) :].strip().upper()
    try:
        size = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise SurefootError(
            option, f"{text!r} is no size", "use bytes, or a number with MiB or GiB"
        ) from None
    if not 1 <= size < 1 << 63:
        raise SurefootError(option, f"{text!r} is out of range")
    return int(size)


def read_proposer_options(items: list[str]) -> dict[str, dict[str, Any]]:
    """``["name.option=4"]`` as ``{"name": {"option": 4}}``; values are JSON, or else text."""
    options: dict[str, dict[str, Any]] = {}
    for item in items:
        key, equals, value = item.partition("=")
        name, dot, option = key.partition(".")
        if not (equals and dot and name and option):
            raise SurefootError("proposer_options", f"{item!r} is not NAME.OPTION=VALUE")
        if option in options.setdefault(name, {}):
            raise SurefootError("proposer_options", f"{key} is given twice")
        try:
            options[name][option] = json.loads(value)
        except ValueError:
            options[name][option] = value
    return options


def read_logit_bias(items: list[str]) -> dict[int, float]:
    """``["42=-1.5"]`` as ``{42: -1.5}``."""
    bias: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            key, number = int(token), float(value)
        except ValueError:
            raise SurefootError("logit_bias", f"{item!r} is not ID=BIAS") from None
        if key in bias:
            raise SurefootError("logit_bias", f"token id {key} is given twice")
        bias[key] = number
    return bias
