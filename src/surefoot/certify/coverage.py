"""What a certificate is about, and what not, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.certify.jobs import CROWD
from surefoot.certify.long_texts import BOUNDARIES, rope_boundary
from surefoot.certify.subject import Subject

if TYPE_CHECKING:
    from surefoot.certify.certificate import Certificate
    from surefoot.certify.findings import Section


def coverage(certificate: Certificate, subject: Subject) -> tuple[list[str], list[str]]:
    """Sentences about what was covered, and about what was not."""
    done: list[str] = []
    open_: list[str] = []
    sections = {section.name: section for section in certificate.sections}
    for part in (_requests, _positions, _options, _drafts, _rounds):
        covered, missing = part(certificate, subject, sections)
        done += covered
        open_ += missing
    open_.append("The HTTP server, other hardware and other versions of this software.")
    return done, open_


Sentences = tuple[list[str], list[str]]
Sections = dict[str, "Section"]


def _requests(certificate: Certificate, subject: Subject, sections: Sections) -> Sentences:
    most = max((s.activity.most for s in certificate.sections), default=0)
    allowed = subject.config.max_num_seqs
    done = [
        f"Batches of 1 to {most} requests, with {certificate.total_of('crowded'):,} rejections "
        f"beside more than {CROWD} others; arrivals one by one, cancellations "
        f"({certificate.total_of('cancellations')}), preemptions "
        f"({certificate.total_of('preemptions')}), prefix hits, prompts in chunks."
    ]
    return done, [] if most >= allowed else [f"Batches of more than {most} requests."]


def _details(sections: Sections, name: str) -> dict[str, Any]:
    """Empty where the section was not run, or was broken off."""
    return sections[name].details if name in sections else {}


def _positions(certificate: Certificate, subject: Subject, sections: Sections) -> Sentences:
    model = subject.decoder.config
    furthest = max((s.activity.furthest for s in certificate.sections), default=0)
    crossed = _details(sections, "long texts").get("boundaries", [])
    listed = ", ".join(f"{item:,}" for item in crossed) or "none"
    done = [f"Drafts up to position {furthest:,}; positions that texts cross: {listed}."]
    missing = [f"Positions from {furthest + 1:,} on; the model takes {model.max_positions:,}."]
    if furthest + 1 >= model.max_positions:
        missing = []
    scaled = rope_boundary(model)
    for edge in (*BOUNDARIES, *([] if scaled is None else [scaled])):
        if edge not in crossed and edge < model.max_positions:
            what = "where the model's RoPE is scaled" if edge == scaled else "of a power of two"
            missing.append(f"The boundary at {edge:,}, {what}: too long for this size.")
    return done, missing


def _options(certificate: Certificate, subject: Subject, sections: Sections) -> Sentences:
    done = ["Seeds of 63 bits, neighbouring ones, and requests without a seed."]
    missing = []
    if details := _details(sections, "sampling parameters"):
        done.append(
            f"{details['combinations']} combinations of sampling options: each alone, and all "
            f"{details['pairs']:,} pairs of two options' values."
        )
        missing.append("Three and more options at once, beyond what the pairs bring along.")
    if subject.tokenizer is None:
        missing.append("Stop strings: there is no tokenizer.")
    if subject.grammars is None:
        missing.append("Structured output: there is no tokenizer.")
    return done, missing


def _drafts(certificate: Certificate, subject: Subject, sections: Sections) -> Sentences:
    refused = certificate.refusals
    done = [
        f"Up to {subject.max_drafts} drafts of a request; requests without drafts, with few and "
        "with many in one batch.",
        f"The second likeliest token as a draft: refused {len(refused.gaps):,} times, "
        f"{refused.near:,} of them near ties; and {refused.likelier:,} times a token likelier than "
        "the sampled one.",
    ]
    missing = []
    for name in subject.hosts:
        verified = certificate.total("verified", (name,))
        if verified:
            done.append(f"{verified:,} drafts of {name}, in texts with a grammar.")
        else:
            missing.append(f"Drafts of {name}: no text with a grammar had any.")
    if subject.trees:
        return [*done, "Trees, with the right path beside wrong branches."], missing
    return done, [*missing, "Trees: no proposer under test offers any."]


def _rounds(certificate: Certificate, subject: Subject, sections: Sections) -> Sentences:
    done = [
        f"{certificate.total_of('replays'):,} recorded rounds, "
        f"{certificate.total_of('called'):,} called ones."
    ]
    if certificate.trials is not None:
        recorded = " through recorded rounds" if subject.recorded else ""
        done.append(f"{len(certificate.trials)} known defects put in{recorded}.")
    missing = []
    if not subject.recorded:
        missing.append("Recorded rounds: this set-up has none.")
    if certificate.trials is None:
        missing.append("Whether known defects are found: no self-test was made.")
    return done, missing
