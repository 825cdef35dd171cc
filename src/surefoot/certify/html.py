"""The certificate as one self-contained HTML page: inline style and SVG, nothing loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from surefoot.certify.certificate import PARITY, Certificate
from surefoot.certify.findings import Difference
from surefoot.certify.plots import Bar, bars
from surefoot.certify.terminal import compared

SHOWN = 20
_COLOURS = {"PASS": "#1a7f37", "FAIL": "#b42318", "INCONCLUSIVE": "#9a6700"}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --ink: #3b6fb6 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: .2rem } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
.result { display: inline-block; padding: .2rem .8rem; border-radius: .4rem; color: #fff;
  font-weight: 700; font-size: 1.3rem }
table { border-collapse: collapse; margin: .8rem 0 } td, th { padding: .25rem .8rem .25rem 0;
  text-align: left; vertical-align: top; border-bottom: 1px solid var(--soft) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; word-break: break-word }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem } figure { margin: .5rem 0 }
figcaption { font-size: .85rem; max-width: 22rem } svg text { fill: currentColor; font-size: 10px }
svg rect { fill: var(--ink) } mark { background: #f5c16c; color: #000 }
"""


def page(certificate: Certificate) -> str:
    """The whole page as text."""
    parts = [
        _introduction(certificate),
        _counts(certificate),
        _coverage(certificate),
        _plots(certificate),
        _differences(certificate),
        _distribution(certificate),
        _self_test(certificate),
        _setup(certificate),
    ]
    return document("Losslessness certificate", certificate.result, "".join(parts))


def document(title: str, result: str, body: str) -> str:
    """A page with its result at the top; ``body`` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}: {result}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        f'<p class="result" style="background:{_COLOURS[result]}">{result}</p>'
        f"{body}</body></html>\n"
    )


def _introduction(certificate: Certificate) -> str:
    lines = "".join(f"<li>{escape(reason)}</li>" for reason in certificate.reasons)
    untested = ""
    if certificate.trials is None:
        untested = "<p>No self-test was made: whether defects would have been seen is unknown.</p>"
    model = escape(str(certificate.setup.get("model", "")))
    return f"<p>{model}</p>{untested}{f'<ul>{lines}</ul>' if lines else ''}"


def _counts(certificate: Certificate) -> str:
    noise = certificate.noise
    rows = [
        (
            section.name,
            f"{section.positions:,}",
            str(len(section.ties)) if section.name in PARITY else "",
            str(len(section.divergences)) if section.name in PARITY else "",
            str(len(section.problems)),
        )
        for section in certificate.sections
    ]
    setup = certificate.setup
    drafts = [
        (name, *(f"{certificate.total(c, (name,)):,}" for c in ("verified", "accepted")))
        for name in (*setup["proposers"], *setup["probes"])
    ]
    return (
        "<h2>Counts</h2>"
        + table(("section", "positions", "ties", "divergences", "problems"), rows)
        + table(("drafts by", "verified", "accepted"), drafts)
        + f"<p>{noise.statement}</p><p>{escape(compared(certificate))}</p>"
    )


def _coverage(certificate: Certificate) -> str:
    parts = []
    for heading, sentences in (
        ("Covered", certificate.covered),
        ("Not covered", certificate.not_covered),
    ):
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        parts.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    return "".join(parts)


def _plots(certificate: Certificate) -> str:
    regrets: Counter[int] = Counter()
    margins: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    for section in certificate.sections:
        regrets.update(_decade(item.regret) for item in (*section.ties, *section.divergences))
        margins.update(section.margins)
        if section.name in PARITY:
            for name in certificate.setup["proposers"]:
                lengths.update(section.activity.lengths.get(name, {}))
    p_values: Counter[int] = Counter()
    for section in certificate.sections:
        for test in section.details.get("tests", ()):
            p_values[min(9, int(test["p"] * 10))] += 1
    figures = [
        bars("Regret of differing tokens", _decades(regrets), "none: no token differs"),
        bars("Distance of best and second token, plain greedy", _decades(margins), "none measured"),
        bars(
            "Rounds by accepted length, proposers under test",
            [Bar(str(length), lengths[length]) for length in sorted(lengths)],
            "no rounds",
        ),
        bars(
            "p-values of the distribution's tests (even if all is well)",
            [Bar(f"{i / 10:.1f}", p_values[i]) for i in range(10)] if p_values else [],
            "no tests",
        ),
    ]
    return f'<h2>Plots</h2><div class="plots">{"".join(figures)}</div>'


def _decade(regret: float) -> int:
    if regret == float("inf"):
        return 4
    return -12 if regret <= 0 else max(-12, min(3, math.floor(math.log10(regret))))


def _decades(counts: Counter[int]) -> list[Bar]:
    if not counts:
        return []
    names = {-12: "0", 4: "∞"}
    used = range(min(counts), max(counts) + 1)
    return [Bar(names.get(i, f"1e{i}"), counts[i]) for i in used if counts[i] or i not in names]


def _differences(certificate: Certificate) -> str:
    found = [item for s in certificate.sections for item in (*s.divergences, *s.ties)]
    if not found:
        return ""
    found.sort(key=lambda item: -item.regret)
    rows = "".join(_difference(item) for item in found[:SHOWN])
    return (
        "<h2>Worst regrets</h2><table><tr><th>kind</th><th class=n>regret</th><th class=n>bound"
        f"</th><th>where</th><th>text, plain token → tested token</th></tr>{rows}</table>"
    )


def _difference(item: Difference) -> str:
    if item.texts is None:
        shown = f"{list(item.context)} {item.plain_token} → {item.tested_token}"
        text = f"<code>{escape(shown)}</code>"
    else:
        context, plain, tested = (escape(part) for part in item.texts)
        text = f"<pre>{context}<mark>{plain}</mark> → <mark>{tested}</mark></pre>"
    return (
        f"<tr><td>{'tie' if item.tie else 'divergence'}</td><td class=n>{item.regret:.3g}</td>"
        f"<td class=n>{item.bound:.3g}</td><td>{escape(item.where)}, token {item.position}</td>"
        f"<td>{text}</td></tr>"
    )


def _distribution(certificate: Certificate) -> str:
    tests = [t for s in certificate.sections for t in s.details.get("tests", ())]
    rows = [
        (
            test["name"],
            f"{test['p']:.3g}",
            str(test["samples"]),
            f"{test['smallest_shift']:.1%}",
            "yes" if test["rejected"] else "",
        )
        for test in sorted(tests, key=lambda test: test["p"])
    ]
    headings = ("test", "p", "samples", "smallest shift it would have seen", "rejected")
    return f"<h2>Distribution</h2>{table(headings, rows)}" if rows else ""


def _self_test(certificate: Certificate) -> str:
    if certificate.trials is None:
        return ""
    rows = [
        (trial.defect, "found" if trial.caught else "NOT FOUND", trial.section, trial.finding)
        for trial in certificate.trials
    ]
    headings = ("an engine that …", "", "by", "first finding")
    return f"<h2>Self-test</h2>{table(headings, rows, numbers=False)}"


def _setup(certificate: Certificate) -> str:
    rows = [(key, str(value)) for key, value in flat(certificate.setup)]
    notes = [note for section in certificate.sections for note in section.notes]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Set-up</h2>{table(('', ''), rows, numbers=False)}<ul>{listed}</ul>"


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as (dotted name, value)."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table whose first column is text and the others numbers."""
    kinds = ["", *(" class=n" if numbers else "" for _ in headings[1:])]
    head = "".join(f"<th{k}>{escape(text)}</th>" for k, text in zip(kinds, headings, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{escape(text)}</td>" for k, text in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
