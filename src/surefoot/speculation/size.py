"""The size of a round: everything about it that the host decides, and by which it is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.sampling.params import SamplingStages

GREEDY = SamplingStages()
ANY_TOP_K = 1 << 30
DRAWN = SamplingStages(noise=True, min_p=True, top_k=ANY_TOP_K, top_p=True)
ADJUSTED = SamplingStages(
    noise=True, penalties=True, bias=True, min_tokens=True, min_p=True, top_k=ANY_TOP_K, top_p=True
)
"""The three kinds of sampling that rounds are recorded for; filters that a row does not have are
told apart on the device."""


def kind_of(stages: SamplingStages) -> SamplingStages:
    """The recorded kind that serves these stages."""
    if stages.adjusts:
        return ADJUSTED
    return DRAWN if stages.noise else GREEDY


@dataclass(frozen=True)
class Size:
    """What tells rounds apart. ``spans`` requests at most, ``rows`` of the flat batch, of which
    ``samples`` are sampled: all of them, unless prompt chunks are among the rows."""

    spans: int
    rows: int
    samples: int
    kind: SamplingStages
    proposers: tuple[int, ...]
    """Who proposes drafts for the next round."""
    steps: int | None = None
    """How many tokens drafters draft for the next round; 0: they only catch up. None: all they can.
    Proposers without a network take no notice."""
    verifies: bool = False
    """Whether drafts get rows."""
    catches_up: bool = True
    """Whether proposers with a network do: some request allows one of them."""
    logprobs: int | None = None
    """How many likely tokens are reported beside each; None: no logprobs."""
    scored: int = 0
    """Spans whose tokens' logprobs are reported, at most; 0 where nobody wants any."""
    masked: bool = False
    """Whether some request has a grammar."""
    prompt_logprobs: int | None = None
    """Likewise of prompt tokens; also where all hidden states of some prompt are wanted. Such
    rounds are never recorded."""

    @property
    def target(self) -> Size:
        """The plainest round with the same rows: all that ``Round.run_target`` depends on."""
        return Size(self.spans, self.rows, self.samples, GREEDY, (), verifies=self.verifies)

    @property
    def has_prompts(self) -> bool:
        """Whether prompt chunks may be among the rows."""
        return self.rows > self.samples

    def longest_span(self, max_drafts: int) -> int:
        """Rows of a span, at most."""
        if self.has_prompts:
            return self.rows
        # Kernels of single rows are quicker.
        return 1 + (max_drafts if self.verifies else 0)
