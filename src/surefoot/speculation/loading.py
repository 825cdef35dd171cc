"""Which proposers an engine loads, and how many drafts each of them may offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from surefoot.config import MOST_DRAFTS, EngineConfig
from surefoot.errors import SurefootError
from surefoot.speculation import registry
from surefoot.speculation.host_proposer import HostProposer
from surefoot.speculation.proposer import Proposer, read_options

USUAL_DRAFTS = 8
"""Of a proposer that can offer any number, where nobody says how many."""
DRAFT_TOKENS = "draft_tokens"


def names_of(config: EngineConfig) -> tuple[str, ...]:
    """The proposers that an engine of this configuration loads."""
    if config.max_draft_tokens == 0:
        return ()
    return tuple(registry.default() if config.proposers is None else config.proposers)


Chosen = list[tuple[type[Proposer], Any]]
ChosenHosts = list[tuple[type[HostProposer], Any]]


def choose_proposers(config: EngineConfig) -> tuple[Chosen, ChosenHosts, int]:
    """Classes and options of the proposers to load, those that work on the host apart, and
    ``max_draft_tokens``: as configured, else what the one that offers most offers, 0 without
    proposers. SurefootError for options that are unknown or mistaken, or that ask for more drafts
    than ``max_draft_tokens`` lets through."""
    names, most = names_of(config), config.max_draft_tokens
    for name in config.proposer_options:
        if name not in names:
            raise SurefootError("proposer_options", f"{name!r} is not among the proposers")
    chosen: list[tuple[Any, Any, int]] = []
    for name in names:
        kind, given = registry.find(name), config.proposer_options.get(name, {})
        options = read_options(kind, given)
        drafts = kind.draft_tokens(options)
        if given.get(DRAFT_TOKENS) is not None and drafts is not None:
            _check_explicit(name, drafts, most)
        chosen.append((kind, options, drafts or most or USUAL_DRAFTS))
    if most is None:
        # Beside others, who works on the host takes what room there is.
        device = [drafts for kind, _, drafts in chosen if not issubclass(kind, HostProposer)]
        most = min(max(device or [drafts for *_, drafts in chosen], default=0), MOST_DRAFTS)
    pairs = [(kind, _with_drafts(options, min(drafts, most))) for kind, options, drafts in chosen]
    hosts = [pair for pair in pairs if issubclass(pair[0], HostProposer)]
    return [pair for pair in pairs if pair not in hosts], hosts, most


def _check_explicit(name: str, drafts: int, most: int | None) -> None:
    if drafts > MOST_DRAFTS:
        raise SurefootError(
            f"{name}.{DRAFT_TOKENS}", f"is above {MOST_DRAFTS}", "a span holds at most 64 rows"
        )
    if most is not None and drafts > most:
        raise SurefootError(
            "max_draft_tokens",
            f"{most} is below {name}.{DRAFT_TOKENS} = {drafts}",
            "raise it, or lower the proposer's",
        )


def _with_drafts(options: Any, drafts: int) -> Any:
    if DRAFT_TOKENS in (item.name for item in fields(options)):
        return replace(options, **{DRAFT_TOKENS: drafts})
    return options


def lower_drafts(options: Mapping[str, Mapping[str, Any]], most: int) -> dict[str, dict[str, Any]]:
    """``proposer_options`` in which nobody asks for more than ``most`` drafts."""
    return {
        name: {
            key: min(value, most) if key == DRAFT_TOKENS and value is not None else value
            for key, value in own.items()
        }
        for name, own in options.items()
    }
