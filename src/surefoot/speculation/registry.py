"""Names of proposers, loaded when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.models.config import ModelConfig
    from surefoot.speculation.host_proposer import HostProposer
    from surefoot.speculation.proposer import Proposer

DRAFTERS = {"eagle3": "EAGLE-3", "dflash": "DFlash, DSpark or DFlash 2"}
"""Proposers with a network of their own, which their option ``path`` names; and what people call
them."""
_PROPOSERS: dict[str, str | type[Proposer] | type[HostProposer]] = {
    "dflash": "surefoot.speculation.proposers.dflash.proposer:DFlashProposer",
    "eagle3": "surefoot.speculation.proposers.eagle3.proposer:Eagle3Proposer",
    "grammar": "surefoot.speculation.proposers.grammar:GrammarProposer",
    "ngram": "surefoot.speculation.proposers.ngram:NgramProposer",
}
RESERVED = ("auto", "off")


def default() -> tuple[str, ...]:
    """The proposers that are loaded where nobody names any: those that need no network, as far as
    what they draft for is installed."""
    from surefoot.speculation.proposers.grammar import available

    return ("ngram", "grammar") if available() else ("ngram",)


def register(proposer: type[Proposer] | type[HostProposer]) -> None:
    """Make a proposer of one's own loadable by its name."""
    if proposer.name in RESERVED:
        raise SurefootError("proposer", f"the name {proposer.name!r} is reserved")
    _PROPOSERS[proposer.name] = proposer


def names() -> list[str]:
    return list(_PROPOSERS)


def find(name: str) -> type[Proposer] | type[HostProposer]:
    """The class of a registered proposer."""
    entry = _PROPOSERS.get(name)
    if entry is None:
        raise SurefootError("proposers", f"{name!r} is unknown", f"known: {', '.join(names())}")
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
        _PROPOSERS[name] = entry
    return entry


def inspect_drafter(path: str, target: ModelConfig | None = None) -> dict[str, Any] | None:
    """JSON-ready facts about the drafter in a local folder or file; None for what is none.

    ``target``: also say whether it fits. Raises SurefootError for a broken one."""
    for name in DRAFTERS:
        kind: Any = find(name)
        facts = kind.inspect(path, target)
        if facts is not None:
            return facts
    return None
