"""A comparison of two servers as lines for the terminal and as a page."""

from __future__ import annotations

from html import escape

from surefoot.certify.blackbox import MIN_POSITIONS, Comparison
from surefoot.certify.html import document, table


def lines(comparison: Comparison) -> list[str]:
    """Everything but the result, for people."""
    noise = comparison.noise
    found = [
        f"A: {comparison.urls[0]} ({comparison.models[0]})",
        f"B: {comparison.urls[1]} ({comparison.models[1]})",
        f"{comparison.positions:,} positions of {comparison.prompts} prompts compared (at least "
        f"{MIN_POSITIONS} needed): {len(comparison.ties)} ties, "
        f"{len(comparison.divergences)} divergences, {len(comparison.unexplained)} unexplained.",
    ]
    if comparison.logprobs:
        found.append(
            f"Own noise of the logprobs: {noise[0]:.3g} and {noise[1]:.3g}; a tie is a difference "
            f"of at most {comparison.bound:.3g}. Logprobs of A and B differ by up to "
            f"{comparison.largest_logprob_error:.3g}."
        )
    else:
        found.append("At least one server gives no logprobs: differences cannot be explained.")
    return found


def page(comparison: Comparison) -> str:
    """The comparison as one self-contained HTML page."""
    mismatches = [*comparison.divergences, *comparison.unexplained, *comparison.ties]
    rows = [
        (
            "tie" if item.tie else "divergence" if item.known else "unexplained",
            f"prompt {item.prompt}, position {item.position}",
            item.context,
            f"{item.left!r} / {item.right!r}",
            " / ".join("?" if regret is None else f"{regret:.3g}" for regret in item.regrets),
        )
        for item in mismatches
    ]
    headings = ("kind", "where", "text before", "A / B", "regrets")
    body = "".join(f"<p>{escape(line)}</p>" for line in lines(comparison))
    body += "".join(f"<li>{escape(reason)}</li>" for reason in comparison.reasons)
    if rows:
        body += f"<h2>Differences</h2>{table(headings, rows, numbers=False)}"
    return document("Two servers compared", comparison.result, body)
