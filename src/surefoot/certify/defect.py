"""What a known defect is."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.certify.subject import Sabotage, Subject

LONG, TREES, RECORDED, DRAFTS = "long texts", "trees", "recorded rounds", "long drafts"
"""What some defects need to show at all."""
NEAR_TIES = "near ties that noise does not explain"
DEEP = 4
"""Drafts in a row that are called long."""


@dataclass(frozen=True)
class Defect:
    """``section``: the section that must find it. ``breaks_plain``: plain decoding has it too, so
    that no comparison with plain decoding can see it. ``needs``: what it takes to show, besides
    the usual. ``scenario``: of the section, the one to begin with. ``near``: logits by which a
    token that it lets pass is worse at most; 0: by any number."""

    name: str
    install: Sabotage
    section: str
    breaks_plain: bool = False
    needs: str = ""
    scenario: str = ""
    near: float = 0.0

    def lacks(self, subject: Subject, bound: float) -> str | None:
        """What a set-up has not got, so that the defect could not show; None: nothing. ``bound``:
        logits that noise explains there."""
        if 0.0 < self.near <= bound:
            return NEAR_TIES
        there = {
            LONG: subject.decoder.config.max_positions > 300,
            TREES: subject.trees,
            RECORDED: bool(subject.recorded),
            DRAFTS: subject.max_drafts >= DEEP,
            "": True,
        }
        return None if there[self.needs] else self.needs
