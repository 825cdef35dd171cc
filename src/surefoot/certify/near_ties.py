"""Near ties: what came second at each position of a text, for a probe to offer, and how near those
came that were refused.

A judge that takes "nearly right" drafts shows only where something nearly right is offered; random
wrong drafts are never near.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.certify.compare import PLAIN_BATCH, Judge
from surefoot.certify.findings import Refusals
from surefoot.certify.jobs import Job, Outcome, TurnedDown
from surefoot.certify.prefill import logits_of
from surefoot.certify.probes import Others
from surefoot.certify.regret import runner_up, tie_bound
from surefoot.certify.subject import RUNNER_UP


def find_others(judge: Judge, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Others]:
    """What came second at every output position of plain texts: of every other sampled text the
    likeliest token beside the sampled one, for judges that look at logits, and of the rest what
    came second with noise. Known ones are not computed again."""
    cache = judge.subject.cache
    keys = [
        ("others", job.prompt, repr(job.params), job.choice, len(out.tokens), place % 2)
        for place, (job, out) in enumerate(zip(jobs, outcomes, strict=True))
    ]
    missing = [place for place, key in enumerate(keys) if key not in cache]
    for first in range(0, len(missing), PLAIN_BATCH):
        part = missing[first : first + PLAIN_BATCH]
        texts = [[*jobs[i].prompt, *outcomes[i].tokens] for i in part]
        starts = [len(jobs[i].prompt) - 1 for i in part]
        rows = logits_of(judge.subject.decoder, [text[:-1] for text in texts], starts)
        for place, logits in zip(part, rows, strict=True):
            job, tokens = jobs[place], outcomes[place].tokens
            found: list[tuple[int, float]] = []
            for at, token in enumerate(tokens):
                row = judge.row(job, tokens[:at])
                found.append(runner_up(logits[at], row, token, likeliest=place % 2 == 1))
            before = len(job.prompt)
            cache[keys[place]] = Others(
                (*[-1] * before, *(second for second, _ in found)),
                (*[float("inf")] * before, *(gap for _, gap in found)),
            )
    return [cache[key] for key in keys]


def refusals(
    judge: Judge,
    tested: Sequence[Job],
    got: Sequence[Outcome],
    known: Sequence[tuple[int, ...]],
    others: Sequence[Others],
    turned_down: Sequence[TurnedDown],
) -> Refusals:
    """Of drafts that were turned down, the gaps of the runners-up. ``known`` and ``others`` are
    what the probe knew: it goes by the first text that fits, which may be another request's; such
    drafts are not counted."""
    found = Refusals()
    for item in turned_down:
        job = tested[item.job]
        if job.method != RUNNER_UP:
            continue
        text = (*job.prompt, *got[item.job].tokens)
        start, at = len(job.prompt) + item.start, len(job.prompt) + item.at
        fits = (i for i, whole in enumerate(known) if whole[:start] == text[:start])
        which = next((i for i in fits if len(known[i]) > start), None)
        if which is None or known[which][: at + 1] != text[: at + 1]:
            continue
        gap = others[which].gaps[at]
        row = judge.row(job, got[item.job].tokens[: item.at])
        bound = 0.0 if judge.noise.bit_exact else tie_bound(judge.noise, row)
        if gap < -bound:
            found.likelier += 1
        elif bound < gap < float("inf") or gap == bound == 0.0:
            found.gaps.append(gap - bound)
    return found
