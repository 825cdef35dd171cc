"""Between the scheduler's plans and the round's tensors: builds a round's inputs, reads its
verdict, measures its time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from surefoot.engine.scheduler import Plan, Span
from surefoot.engine.stats import Drafting
from surefoot.engine.structured import cut_offers, token_masks
from surefoot.kv.transaction import KVManager
from surefoot.request import Request
from surefoot.sampling.logprobs import RowLogprobs, pack, unpack
from surefoot.sampling.params import Features
from surefoot.speculation.controller import Choice, Controller
from surefoot.speculation.layout import RoundPlan
from surefoot.speculation.proposer import ServedRows
from surefoot.speculation.round import SpeculativeRound, Verdict, Wanted
from surefoot.speculation.state import SlotState
from surefoot.speculation.thrift import Thrift


@dataclass
class Outcome:
    """A round as the host reads it, by request id."""

    committed: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    drafting: dict[str, Drafting] = field(default_factory=dict)


class Runner:
    """Owns the slots, the round and the controller's host side."""

    def __init__(
        self, state: SlotState, round_: SpeculativeRound, controller: Controller, kv: KVManager
    ) -> None:
        self.state = state
        self.round = round_
        self.controller = controller
        self.kv = kv
        self.offered: dict[str, int] = {}
        """Drafts on offer for the next round, as of the last verdict."""
        self.thrift: dict[int, Thrift] = {}
        """By index, of the proposers whose drafting costs something that may not pay."""
        if controller.policy == "auto":
            self.thrift = {
                index: Thrift(need.longest_draft)
                for index, need in enumerate(round_.needs)
                if need.has_network
            }
        self._choice: tuple[list[str], Choice] | None = None
        self._wanted_before: tuple[list[Request], Wanted] = ([], Wanted())

    def admit(self, requests: Sequence[Request]) -> None:
        """Enter requests, new or resumed, into their slots' tensors."""
        if not requests:
            return
        self.state.admit(requests)
        slots = [request.slot for request in requests]
        self.controller.admit(slots, [request.speculation for request in requests])
        # Proposers look for what they know of a prefix hit in its blocks.
        self._set_blocks(requests)
        for proposer in self.round.proposers:
            for slot in slots:
                proposer.admit(slot)
        for request in requests:
            self.offered.pop(request.request_id, None)
            if not request.prompt_scored:
                # Preempted halfway through its prompt, which now runs again from the start.
                request.prompt_logprobs.clear()

    def _set_blocks(self, requests: Iterable[Request]) -> None:
        leases = self.kv.leases
        self.state.set_blocks((r.slot, leases[r.request_id].blocks) for r in requests)

    def draft_sizes(self, decoding: Sequence[Request], base_rows: int) -> Mapping[str, int]:
        """The controller's split of the coming round over the offers at hand."""
        self._choice = None
        if not any(self.offered.get(request.request_id) for request in decoding):
            return {}
        cut_offers(self.controller, decoding)
        slots = torch.tensor([request.slot for request in decoding], device=self.state.device)
        choice = self.controller.choose(slots)
        counts = self.controller.split(choice, base_rows)
        if not counts.any():
            probe = self.controller.probe(choice, base_rows)
            if probe is None:
                return {}
            counts = probe
        names = [request.request_id for request in decoding]
        self._choice = names, choice
        return dict(zip(names, counts.tolist(), strict=True))

    def run(self, plan: Plan) -> Outcome:
        """Run a plan's round. Raises whatever the device raises; the caller's transaction then
        rolls back."""
        spans = sorted(plan.spans, key=lambda span: (span.samples, not span.request.prefilling))
        self._set_blocks(span.request for span in spans)
        round_plan = self._round_plan(spans)
        choice = self._chosen(spans[round_plan.first_decoding :])
        wanted = self._wanted(spans, round_plan)
        if any(span.request.grammar is not None for span in spans):
            first, vocab = round_plan.first_decoding, self.state.vocab_size
            masks = token_masks(spans, first, choice, vocab, self.state.device)
            wanted = replace(wanted, masks=masks)
        if wanted.catching_up:
            wanted = replace(wanted, catching_up=self._served_rows(spans, wanted.catching_up))
        steps = self._steps(wanted, round_plan)
        if steps:
            wanted = replace(wanted, steps=steps)
        started = time.perf_counter()
        verdict = self.round(round_plan, choice, wanted)
        outcome = self._read(spans, round_plan, choice, verdict)
        drafting = self.controller.draft_seconds
        if round_plan.first_decoding == 0 and wanted.logprobs is None:
            seconds = time.perf_counter() - started - sum(drafting.values())
            self.controller.cost.observe(round_plan.rows, seconds)
        if self.thrift:
            self._account(outcome, steps, drafting)
        return outcome

    def _steps(self, wanted: Wanted, plan: RoundPlan) -> dict[int, int]:
        """How far each drafter should draft; 0 for one that sleeps."""
        batch = len(plan.slots) - plan.first_sampling
        cost, steps = self.controller.cost, {}
        for index in wanted.proposers:
            thrift = self.thrift.get(index)
            if thrift is None or batch == 0:
                continue
            plain = cost.predict(batch)
            row = cost.predict(2 * batch) - plain
            steps[index] = thrift.steps(plain, row) if thrift.awake else 0
        return steps

    def _account(
        self, outcome: Outcome, steps: Mapping[int, int], seconds: Mapping[int, float]
    ) -> None:
        """Hold what drafts brought against what they cost. ``outcome`` is of the drafts of the
        round before, ``steps`` and ``seconds`` of those for the next."""
        cost = self.controller.cost
        batch = max(1, len(outcome.drafting))
        drafts = sum(item.drafted for item in outcome.drafting.values())
        plain = cost.predict(batch)
        extra = cost.predict(batch + drafts) - plain
        for index, thrift in self.thrift.items():
            name = self.controller.names[index]
            own = [item for item in outcome.drafting.values() if item.proposer == name]
            if steps.get(index) == 0:
                thrift.rest()
                continue
            if index in seconds:
                thrift.drafted(seconds[index], steps[index])
                share = sum(item.drafted for item in own) / max(1, drafts)
                outcomes = [(item.drafted, item.accepted) for item in own]
                thrift.verified(outcomes, plain / batch, extra * share)

    def _round_plan(self, spans: Sequence[Span]) -> RoundPlan:
        numbers = [span.request.slot for span in spans]
        numbers += [span.rows for span in spans]
        numbers += [span.drafts for span in spans]
        table = torch.tensor(numbers, device=self.state.device).view(3, len(spans))
        sampling = [span for span in spans if span.samples]
        rows = sum(span.rows + span.drafts for span in spans)
        sampled_rows = sum(1 + span.drafts for span in sampling)
        return RoundPlan(
            slots=table[0],
            known=table[1],
            drafts=table[2],
            rows=rows,
            sampled_rows=sampled_rows,
            every_row_samples=rows == sampled_rows,
            first_sampling=len(spans) - len(sampling),
            first_decoding=sum(span.request.prefilling for span in spans),
            max_keys=max(s.request.computed + s.rows + s.drafts for s in spans),
        )

    def _chosen(self, decoding: Sequence[Span]) -> Choice | None:
        """The choice behind the drafts of these spans, in their order."""
        if self._choice is None or not any(span.drafts for span in decoding):
            return None
        names, choice = self._choice
        wanted = [span.request.request_id for span in decoding]
        if names == wanted:
            return choice
        index = torch.tensor([names.index(name) for name in wanted], device=self.state.device)
        return choice.of(index)

    def _wanted(self, spans: Sequence[Span], plan: RoundPlan) -> Wanted:
        # Between arrivals and ends, decoding rounds all want the same.
        requests = [span.request for span in spans]
        before, wanted = self._wanted_before
        if plan.first_decoding == 0 and list(map(id, before)) == list(map(id, requests)):
            return wanted
        wanted = self._work_out_wanted(spans, plan)
        self._wanted_before = (requests if plan.first_decoding == 0 else [], wanted)
        return wanted

    def _work_out_wanted(self, spans: Sequence[Span], plan: RoundPlan) -> Wanted:
        everyone = [span.request for span in spans]
        requests = everyone[plan.first_sampling :]
        widths = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        scored = [span for span in spans if _prompt_targets(span)]
        return Wanted(
            features=Features.of(request.params for request in requests),
            logprobs=max(widths) if widths else None,
            proposers=self._allowed_by(requests),
            catching_up=dict.fromkeys(self._allowed_by(everyone)),
            prompt_rows=self._prompt_rows(spans) if scored else None,
            prompt_logprobs=max(
                (span.request.params.prompt_logprobs or 0 for span in scored), default=0
            ),
        )

    def _served_rows(
        self, spans: Sequence[Span], allowed: Iterable[int]
    ) -> dict[int, ServedRows | None]:
        """By proposer: the rows of the spans whose requests allow it; None if all do."""
        found: dict[int, ServedRows | None] = {}
        for index in allowed:
            name = self.controller.names[index]
            places = [at for at, s in enumerate(spans) if s.request.speculation.allows(name)]
            found[index] = None
            if len(places) < len(spans):
                sizes = [span.rows + span.drafts for span in spans]
                ends = list(itertools.accumulate(sizes))
                rows = [row for at in places for row in range(ends[at] - sizes[at], ends[at])]
                device = self.state.device
                found[index] = ServedRows(
                    torch.tensor(places, device=device), torch.tensor(rows, device=device)
                )
        return found

    def _allowed_by(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Indices of the proposers that any of the requests allows."""
        choices = {id(request.speculation): request.speculation for request in requests}.values()
        names = enumerate(self.controller.names)
        return tuple(index for index, name in names if any(c.allows(name) for c in choices))

    def _prompt_rows(self, spans: Sequence[Span]) -> torch.Tensor:
        rows, first = [], 0
        for span in spans:
            rows.extend(range(first, first + _prompt_targets(span)))
            first += span.rows + span.drafts
        return torch.tensor(rows, device=self.state.device)

    def _read(
        self,
        spans: Sequence[Span],
        plan: RoundPlan,
        choice: Choice | None,
        verdict: Verdict,
    ) -> Outcome:
        """The one copy from the device to the host in a round."""
        columns = [verdict.counts, verdict.accepted, verdict.ends, verdict.offered]
        columns += [verdict.first_sample, plan.drafts]
        packed = _to_host(columns, verdict.tokens)
        proposers = [] if choice is None else choice.proposer.tolist()
        scores = None if verdict.logprobs is None else pack(verdict.logprobs).cpu()
        self._read_prompt_scores(spans, verdict.prompt_logprobs)
        outcome = Outcome()
        for index, (span, row) in enumerate(zip(spans, packed, strict=True)):
            request = span.request
            if not span.samples:
                continue
            count, accepted, end, offered, first_sample, drafted, *tokens = row
            outcome.committed[request.request_id] = tokens[:count]
            outcome.ends[request.request_id] = end
            name = None
            if drafted:
                name = self.controller.names[proposers[index - plan.first_decoding]]
            drafts = min(accepted, count)
            request.stats.count(name, offered, drafted, drafts)
            outcome.drafting[request.request_id] = Drafting(name, offered, drafted, drafts)
            request.note_drafts(name, drafts)
            if scores is not None and request.params.logprobs is not None:
                request.logprobs += unpack(
                    scores[first_sample:], tokens[:count], request.params.logprobs
                )
            self.offered[request.request_id] = offered
        return outcome

    def _read_prompt_scores(self, spans: Sequence[Span], chunks: Sequence[RowLogprobs]) -> None:
        if not chunks:
            return
        scores = torch.cat([pack(chunk) for chunk in chunks]).cpu()
        first = 0
        for span in spans:
            count, request = _prompt_targets(span), span.request
            if count:
                start = request.computed + 1
                tokens = request.prompt[start : start + count]
                width = request.params.prompt_logprobs or 0
                request.prompt_logprobs += unpack(scores[first:], tokens, width)
            first += count

    def forget(self, request: Request) -> None:
        """A request ended."""
        self.offered.pop(request.request_id, None)


def _to_host(columns: Sequence[torch.Tensor], rows: torch.Tensor) -> list[list[int]]:
    """[B] columns and [B, n] rows side by side, in one copy where there is a device to wait for."""
    if rows.device.type == "cpu":
        values = zip(*(column.tolist() for column in columns), strict=True)
        return [[*left, *right] for left, right in zip(values, rows.tolist(), strict=True)]
    return torch.cat((torch.stack(list(columns), dim=1), rows), dim=1).tolist()


def _prompt_targets(span: Span) -> int:
    """How many prompt tokens are predicted by this span's rows and still lack their logprob."""
    request = span.request
    if request.prompt_scored:
        return 0
    return max(0, min(request.computed + span.rows, len(request.prompt) - 1) - request.computed)
