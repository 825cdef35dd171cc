"""How a scenario runs a job: who drafts for it, how deep, when it arrives, how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.certify.jobs import PLAIN, Job
from surefoot.certify.sizes import Scenario
from surefoot.certify.subject import GARBAGE, MIXED, RIGHT, RUNNER_UP, TREE, Subject

PROBES = MIXED, RUNNER_UP, MIXED, RIGHT, RUNNER_UP, GARBAGE, MIXED, PLAIN
AUTO = "auto"


def arranged(
    job: Job, scenario: Scenario, place: int, number: int, subject: Subject, drafts: int
) -> Job:
    """Job ``place`` of scenario ``number``, whose engine verifies ``drafts`` of a request at
    most."""
    method, limit = _who(scenario, place, number, subject, drafts)
    length = job.params.max_tokens or 1
    if scenario.length is not None:
        length = min(length, scenario.length)
    # Odd lengths now and then: requests that end with their first token or inside a span.
    length = {5: 1, 9: max(1, length // 3), 12: max(1, length - 5)}.get(place % 14, length)
    return replace(
        job,
        method=method,
        max_drafts=limit,
        params=replace(job.params, max_tokens=length),
        arrival=place * scenario.stagger,
        cancel=place * scenario.stagger + 3 + 2 * place if scenario.cancel and place % 2 else None,
    )


def _who(
    scenario: Scenario, place: int, number: int, subject: Subject, drafts: int
) -> tuple[str, int | None]:
    """Who drafts for a request, and its own limit of drafts."""
    turn, proposers = place + number, subject.proposers
    if scenario.drafts_by == "runner-up":
        return RUNNER_UP, None
    if scenario.drafts_by == "tree":
        return (TREE if place % 3 else proposers[place // 3 % len(proposers)]), None
    if scenario.drafts_by == "mixed":
        return _mixed(turn, proposers, drafts)
    if scenario.policy == "auto":
        return (AUTO if turn % 3 == 2 else proposers[turn % len(proposers)]), None
    # Half of the jobs go to the proposers under test; one in sixteen has no drafts at all.
    if turn % 2:
        return proposers[(turn // 2) % len(proposers)], None
    method = PROBES[(turn // 2) % len(PROBES)]
    # Garbage is offered for its shape; a few drafts of it show as much as many.
    return method, 2 if method == GARBAGE else None


def _mixed(turn: int, proposers: Sequence[str], drafts: int) -> tuple[str, int | None]:
    proposer = proposers[turn // 8 % len(proposers)]
    return (
        (RIGHT, None),
        (PLAIN, None),
        (MIXED, 1),
        (AUTO, None),
        (RUNNER_UP, min(2, drafts)),
        (proposer, max(1, drafts // 2)),
        (proposer, 0),
        (MIXED, max(1, drafts - 1)),
    )[turn % 8]
