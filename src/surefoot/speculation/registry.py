"""Names of proposers, loaded when asked for."""

from __future__ import annotations

import importlib

from surefoot.errors import SurefootError
from surefoot.speculation.proposer import Proposer

DEFAULT = ("ngram",)
_PROPOSERS: dict[str, str | type[Proposer]] = {
    "ngram": "surefoot.speculation.proposers.ngram:NgramProposer",
}
RESERVED = ("auto", "off")


def register(proposer: type[Proposer]) -> None:
    """Make a proposer of one's own loadable by its name."""
    if proposer.name in RESERVED:
        raise SurefootError("proposer", f"the name {proposer.name!r} is reserved")
    _PROPOSERS[proposer.name] = proposer


def names() -> list[str]:
    return list(_PROPOSERS)


def find(name: str) -> type[Proposer]:
    """The class of a registered proposer."""
    entry = _PROPOSERS.get(name)
    if entry is None:
        raise SurefootError("proposers", f"{name!r} is unknown", f"known: {', '.join(names())}")
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
        _PROPOSERS[name] = entry
    return entry
