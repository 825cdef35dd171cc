"""The model card of a trained drafter: what it is, how it was made, what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any


def card(facts: Mapping[str, Any]) -> str:
    """Markdown. ``facts``: as ``run`` collects them."""
    results, trained = facts["results"], facts["trained"]
    greedy = results["on_policy"]["greedy"]
    lines = [
        f"# {facts['label']} drafter for {facts['target']}",
        "",
        "For speculative decoding: it proposes tokens that the target checks. With Surefoot the "
        "text is the target's own, whatever is proposed.",
        "",
        "```sh",
        f"surefoot chat --model {facts['target']} --{facts['proposer']} PATH",
        "```",
        "",
        "## Measured",
        "",
        f"On {facts['held_out']} held-out documents that the target wrote, tokens per round with "
        "the target's own included:",
        "",
        "| | accepted length |",
        "| --- | --- |",
    ]
    for count, length in results["accepted_length"].items():
        lines.append(f"| greedy, chains of {count} drafts, rounds walked offline | {length:.2f} |")
    if results["without_markov"] is not None:
        lines.append(
            f"| the same, if no draft knew of the one before it | {results['without_markov']:.2f} |"
        )
    if facts["successors"] is not None:
        usual = next(iter(results["accepted_length"]))
        lines.append(
            f"| greedy, chains of {usual} from a table of each token's most frequent successor | "
            f"{facts['successors']:.2f} |"
        )
    if facts.get("engine") is not None:
        engine = facts["engine"]
        lines.append(
            f"| greedy, chains of {engine['depth']} drafts, {engine['prompts']} prompts in the "
            f"engine (offline, the same: {engine['offline']:.2f}) | {engine['length']:.2f} |"
        )
    lines += [
        f"| temperature 1, expected at best, {facts['depth']} drafts | "
        f"{results['sampled_length']:.2f} |",
        "",
        "| draft | greedy: accepted | if those before it were | overlap of distributions |",
        "| --- | --- | --- | --- |",
    ]
    rows = zip_longest(results["survival"], results["conditional"], results["marginal"])
    for index, (survival, conditional, marginal) in enumerate(rows, 1):
        shares = ["–" if share is None else f"{share:.1%}" for share in (survival, conditional)]
        lines.append(f"| {index} | {shares[0]} | {shares[1]} | {marginal:.3f} |")
    lines += [
        "",
        f"The first draft is the target's likeliest token in {results['agreement']:.1%} of all "
        f"rows. {results['on_policy']['all']:.1%} of the held-out tokens are the target's likeliest"
        + ("." if greedy is None else f", and {greedy:.1%} of those in greedy documents."),
        *_confidence(results["confidence"]),
        "",
        "## Made",
        "",
    ]
    lines += [f"- {name.replace('_', ' ')}: {_shown(value)}" for name, value in trained.items()]
    lines += ["", "## Certificate", ""]
    certificate = facts.get("certificate")
    lines.append(
        f"`surefoot certify --quick`: {certificate}" if certificate else "Not certified yet."
    )
    return "\n".join(lines) + "\n"


def _confidence(found: Mapping[str, float] | None) -> list[str]:
    if found is None:
        return []
    return [
        "",
        f"Its confidence at temperature 1: {found['told']:.3f} on average, where "
        f"{found['found']:.3f} is right; {found['apart']:.3f} apart from draft to draft.",
    ]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
