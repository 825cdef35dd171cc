"""Compares a tested text with plain decoding's, and goes on behind every tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.certify.findings import Difference, Section
from surefoot.certify.jobs import PLAIN, Job, Outcome, run_jobs
from surefoot.certify.noise import Noise
from surefoot.certify.prefill import logits_of
from surefoot.certify.regret import Row, adjusted, regret, tie_bound
from surefoot.certify.structure import allowed_tokens
from surefoot.certify.subject import Subject
from surefoot.request import SamplingParams, TokenLogprobs
from surefoot.sampling.token_rules import word_tokens

PLAIN_BATCH = 16
SHOWN_CONTEXT = 24


@dataclass(frozen=True)
class Judge:
    """Bound to a set-up and its calibrated noise."""

    subject: Subject
    noise: Noise

    def plain_texts(self, jobs: Sequence[Job], prefix_caching: bool = False) -> list[Outcome]:
        """What plain decoding gives, in an engine without proposers or shortage of memory, and by
        default without a prefix cache. Known texts are not computed again."""
        cache = self.subject.cache
        plain = [
            replace(job, method=PLAIN, max_drafts=None, arrival=0, cancel=None, label="")
            for job in jobs
        ]
        keys = [(job.prompt, repr(job.params), job.choice, job.start) for job in plain]
        missing = [index for index, key in enumerate(keys) if key not in cache]
        if missing:
            wanted = [replace(plain[index], leader=None) for index in missing]
            engine = self.subject.engine(
                max(job.longest for job in wanted),
                PLAIN_BATCH,
                max_draft_tokens=0,
                enable_prefix_caching=prefix_caching,
            )
            outcomes, _ = run_jobs(engine, wanted, self.subject.tokenizer)
            for index, outcome in zip(missing, outcomes, strict=True):
                cache[keys[index]] = outcome
        return [cache[key] for key in keys]

    def compare(self, section: Section, where: str, job: Job, want: Outcome, got: Outcome) -> None:
        """Enter every difference between ``got`` and plain decoding's ``want`` into ``section``."""
        section.texts += 1
        # A grammar that cannot go on aborts plain decoding too.
        cancelled = got.finish == "abort" != want.finish
        at = len(job.start)
        first_tie: int | None = None
        while (found := _first_difference(want.tokens, got.tokens, at)) is not None:
            section.positions += found - at
            at = found
            if at >= min(len(want.tokens), len(got.tokens)):
                break
            difference = self._difference(where, job, want.tokens, got.tokens[at], at)
            section.enter(difference)
            section.positions += 1
            if not difference.tie:
                return
            first_tie = at if first_tie is None else first_tie
            at += 1
            want = self._continued(job, got.tokens[:at])
        else:
            section.positions += len(got.tokens) - at
            at = len(got.tokens)
        self._compare_ends(section, where, job, want, got, cancelled)
        if first_tie is None:
            self._compare_logprobs(section, where, job, want, got)

    def _compare_ends(
        self, section: Section, where: str, job: Job, want: Outcome, got: Outcome, cancelled: bool
    ) -> None:
        if cancelled:
            if len(got.tokens) > len(want.tokens):
                section.problem(f"{where}: runs on where plain decoding ends")
            return
        if len(got.tokens) != len(want.tokens):
            section.problem(
                f"{where}: {len(got.tokens)} tokens, plain decoding gives {len(want.tokens)}"
            )
        elif (got.finish, got.stop_reason) != (want.finish, want.stop_reason):
            section.problem(
                f"{where}: ends by {got.finish} ({got.stop_reason}), plain decoding by "
                f"{want.finish} ({want.stop_reason})"
            )
        elif None not in (got.text, want.text) and got.text != want.text:
            section.problem(f"{where}: the same tokens, but the text {got.text!r}")

    def _compare_logprobs(
        self, section: Section, where: str, job: Job, want: Outcome, got: Outcome
    ) -> None:
        params = job.params
        pairs: list[tuple[TokenLogprobs, TokenLogprobs]] = []
        if params.logprobs is not None:
            if len(got.logprobs) != len(got.tokens):
                section.problem(f"{where}: {len(got.logprobs)} logprobs, {len(got.tokens)} tokens")
            pairs += zip(want.logprobs, got.logprobs, strict=False)
        if params.prompt_logprobs is not None and got.finish != "abort":
            if len(got.prompt_logprobs) != len(job.prompt) - 1:
                section.problem(f"{where}: {len(got.prompt_logprobs)} prompt logprobs")
            pairs += zip(want.prompt_logprobs, got.prompt_logprobs, strict=False)
        tolerance = self.noise.logprob_tolerance
        for left, right in pairs:
            section.logprobs += 1
            error = abs(left.logprob - right.logprob)
            if len(left.top) != len(right.top) or left.token_id != right.token_id:
                error = float("inf")
            for (_, a), (_, b) in zip(left.top, right.top, strict=False):
                error = max(error, abs(a - b))
            section.largest_logprob_error = max(section.largest_logprob_error, error)
            if error > tolerance:
                section.problem(
                    f"{where}: a logprob is off by {error:.3g}, tolerance {tolerance:.3g}"
                )
                return

    def anchor(self, section: Section, jobs: Sequence[Job], texts: Sequence[Outcome]) -> None:
        """Check plain decoding itself: each of its tokens must be the best one, up to noise, on
        logits of its text prefilled afresh, without an engine."""
        wholes = [[*job.prompt, *out.tokens] for job, out in zip(jobs, texts, strict=True)]
        for start in range(0, len(jobs), PLAIN_BATCH):
            part = range(start, min(start + PLAIN_BATCH, len(jobs)))
            # The last token predicts nothing that was compared.
            logits = logits_of(
                self.subject.decoder,
                [wholes[i][:-1] for i in part],
                [len(jobs[i].prompt) - 1 for i in part],
            )
            for index, rows in zip(part, logits, strict=True):
                self._anchor_text(section, jobs[index], texts[index].tokens, rows)

    def _anchor_text(
        self, section: Section, job: Job, tokens: Sequence[int], logits: torch.Tensor
    ) -> None:
        for at, token in enumerate(tokens):
            row = self.row(job, tokens[:at])
            bound = tie_bound(self.noise, row)
            loss = regret(logits[at], row, token, bound)
            if job.params.greedy:
                best = adjusted(logits[at], row).topk(2).values
                section.margins[_decade(float(best[0] - best[1]))] += 1
            if loss > bound:
                section.problem(
                    f"plain decoding of {job.label or 'a prompt'}: token {at} has regret "
                    f"{loss:.3g} on logits computed afresh, bound {bound:.3g}"
                )
                return

    def row(self, job: Job, output: Sequence[int]) -> Row:
        params = job.params
        ends = () if params.ignore_eos else self.subject.decoder.config.eos_token_ids
        stops = tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))
        allowed = self._allowed(params, output)
        bad, grammars = [], self.subject.grammars
        if params.bad_words and grammars is not None:
            bad = word_tokens(grammars.tokenizer, params.bad_words)
        return Row(job.prompt, list(output), params, job.choice, stops, allowed, bad)

    def _allowed(self, params: SamplingParams, output: Sequence[int]) -> torch.Tensor | None:
        """By a grammar's state that never saw a draft."""
        if params.structured_outputs is None or self.subject.grammars is None:
            return None
        state = self.subject.grammars.start(params.structured_outputs)
        state.sync(output)
        return allowed_tokens(state, self.subject.decoder.config.vocab_size)

    def _difference(
        self, where: str, job: Job, plain: Sequence[int], token: int, at: int
    ) -> Difference:
        before = [*job.prompt, *plain[:at]]
        [logits] = logits_of(self.subject.decoder, [before], [len(before) - 1])
        row = self.row(job, plain[:at])
        # Where the arithmetic is exact to the bit, no rounding is left to explain a difference.
        bound = 0.0 if self.noise.bit_exact else tie_bound(self.noise, row)
        context = tuple(before[-SHOWN_CONTEXT:])
        tokenizer = self.subject.tokenizer
        texts = None
        if tokenizer is not None:
            parts = (list(context), [plain[at]], [token])
            texts = (tokenizer.decode(parts[0]), tokenizer.decode(parts[1]), "")
            texts = (*texts[:2], tokenizer.decode(parts[2]))
        return Difference(
            where=where,
            position=at,
            plain_token=plain[at],
            tested_token=token,
            regret=regret(logits[0], row, token, bound),
            plain_regret=regret(logits[0], row, plain[at], bound),
            bound=bound,
            context=context,
            texts=texts,
        )

    def _continued(self, job: Job, known: Sequence[int]) -> Outcome:
        """Plain decoding from a text that already has the output tokens ``known``."""
        row = self.row(job, known)
        if known[-1] in row.ends:
            return Outcome(list(known), "stop", known[-1])
        if len(known) >= (job.params.max_tokens or 0):
            return Outcome(list(known), "length")
        [outcome] = self.plain_texts([replace(job, start=tuple(known), leader=None)])
        return outcome


def _first_difference(left: Sequence[int], right: Sequence[int], start: int) -> int | None:
    for index in range(start, min(len(left), len(right))):
        if left[index] != right[index]:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _decade(gap: float) -> int:
    if gap <= 0:
        return -12
    if gap == float("inf"):
        return 3  # A grammar left one token.
    return max(-12, min(3, int(torch.tensor(gap).log10().floor())))
