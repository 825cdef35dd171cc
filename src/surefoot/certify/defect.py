"""What a known defect is."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.certify.subject import Sabotage, Subject

LONG, TREES, RECORDED, DRAFTS = "long texts", "trees", "recorded rounds", "long drafts"
"""What some defects need to show at all."""
DEEP = 4
"""Drafts in a row that are called long."""


@dataclass(frozen=True)
class Defect:
    """``section``: the section that must find it. ``breaks_plain``: plain decoding has it too, so
    that no comparison with plain decoding can see it. ``needs``: what it takes to show, besides
    the usual. ``scenario``: of the section, the one to begin with."""

    name: str
    install: Sabotage
    section: str
    breaks_plain: bool = False
    needs: str = ""
    scenario: str = ""

    def lacks(self, subject: Subject) -> str | None:
        """What a set-up has not got, so that the defect could not show; None: nothing."""
        there = {
            LONG: subject.decoder.config.max_positions > 300,
            TREES: subject.trees,
            RECORDED: bool(subject.recorded),
            DRAFTS: subject.max_drafts >= DEEP,
            "": True,
        }
        return None if there[self.needs] else self.needs
