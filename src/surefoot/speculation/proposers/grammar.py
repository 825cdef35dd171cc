"""Forced text: where a request's grammar leaves one continuation, offer it.

Keys, punctuation and the frames of tool calls are the model's own choice only as far as it may cut
them into tokens in several ways; they are cut as the tokenizer would.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.errors import SurefootError
from surefoot.request import Request
from surefoot.sampling.grammar import missing_package
from surefoot.speculation.host_proposer import HostDrafts, HostProposer


@dataclass(frozen=True)
class GrammarOptions:
    """There are none."""


class GrammarProposer(HostProposer):
    name = "grammar"
    Options = GrammarOptions

    def __init__(self, options: GrammarOptions) -> None:
        super().__init__(options)
        if (problem := missing_package()) is not None:
            raise SurefootError("proposers", f"'grammar' {problem}", "install surefoot[structured]")

    def propose(self, request: Request, most: int) -> HostDrafts:
        if request.grammar is None:
            return HostDrafts()
        return HostDrafts(*request.grammar.forced(most))


def available() -> bool:
    """Whether structured output is installed."""
    return missing_package() is None
