"""The engine: requests in, rounds, tokens out. No tokenizer and no text here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from surefoot.config import EngineConfig
from surefoot.engine.admission import check_speculation, check_texts
from surefoot.engine.loop import Loop
from surefoot.engine.memory import Allocations
from surefoot.engine.pool_size import check_block_size, model_length, size_pool
from surefoot.engine.recording import count_recorded, prepare_rounds
from surefoot.engine.scheduler import Scheduler
from surefoot.engine.stats import EngineStats, Progress
from surefoot.engine.structured import dead_end
from surefoot.engine.whole import Restored, whole
from surefoot.kernels.backend import Backend
from surefoot.kv.transaction import KVManager
from surefoot.models.decoder import Decoder
from surefoot.request import (
    MAX_SEED,
    FinishReason,
    PromptPool,
    Request,
    SamplingParams,
    SpeculationParams,
)
from surefoot.sampling.grammar import Grammars
from surefoot.sampling.token_rules import follow
from surefoot.speculation.controller import Controller
from surefoot.speculation.host_offers import HostOffers
from surefoot.speculation.loading import choose_proposers
from surefoot.speculation.proposer import Proposer
from surefoot.speculation.round import Round
from surefoot.speculation.state import SlotState
from surefoot.speculation.upkeep import Upkeep

_END_REASONS = {1: FinishReason.STOP, 2: FinishReason.LENGTH}


class Engine(Restored):
    """Runs requests on a decoder. Single-threaded: call its methods from one thread."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        ahead: bool | None = None,
        prepare: Callable[[Round], None] | None = None,
    ) -> None:
        """``ahead``: whether rounds are launched before the one before is read, in few sizes; None:
        on a GPU, unless ``config.enforce_eager``. ``prepare`` may change the round, before the
        first one runs and is measured."""
        self.decoder = decoder
        chosen, hosts, drafts = choose_proposers(config)
        self.config = config = replace(config, max_draft_tokens=drafts)
        self.grammars: Grammars | None = None
        """What compiles structured output and knows words; it takes a tokenizer, which
        ``build_engine`` has."""
        backend: Backend = decoder.backend
        check_block_size(config, decoder)
        self.max_model_len = model_length(config, decoder.config)
        on_gpu = backend.device.type == "cuda"
        self._taken = Allocations(backend.device)
        self._taken.enter("weights")
        if ahead is None:
            ahead = on_gpu and not config.enforce_eager
        self.state = SlotState(
            config.max_num_seqs,
            self.max_model_len,
            drafts,
            config.block_size,
            decoder.config.vocab_size,
            backend.device,
        )
        self._taken.enter("slots")
        self.proposers = self._load_proposers(chosen)
        self._taken.enter("drafters")
        needs = [item.needs() for item in self.proposers]
        pairs = zip(self.proposers, needs, strict=True)
        self._drafters = [item.name for item, need in pairs if need.kv_bytes_per_token]
        """Proposers with KV of their own."""
        self.kv_blocks, self.memory = size_pool(
            decoder, config, self.state, self.max_model_len, needs, self._taken
        )
        for proposer in self.proposers:
            proposer.allocate(self.kv_blocks)
        kv_pools = backend.allocate_kv(
            decoder.config.layers, self.kv_blocks, config.block_size, decoder.shape
        )
        self.kv = KVManager(self.kv_blocks, config.block_size, config.enable_prefix_caching)
        keeping = [index for index, need in enumerate(needs) if need.kv_bytes_per_token]
        chooses = keeping and config.draft_policy == "auto"
        upkeep = Upkeep(keeping, config.max_num_seqs) if chooses else None
        self.scheduler = Scheduler(self.kv, config.max_num_seqs, upkeep)
        names = [proposer.name for proposer in self.proposers]
        self.hosts = HostOffers(
            [kind(options) for kind, options in hosts], len(names), decoder.config.vocab_size
        )
        """The proposers that work on the host."""
        trees = [need.trees for need in needs]
        self.controller = Controller(self.state, names, trees)
        self.round = Round(
            decoder, kv_pools, self.state, self.proposers, self.controller, config.max_num_seqs
        )
        if prepare is not None:
            prepare(self.round)
        self.stats = EngineStats()
        before = self._taken.reserved()
        self.rounds, self.planner, limits = prepare_rounds(self.round, config, self.kv, ahead)
        if self.memory is not None:
            held = self._taken.reserved() - before
            self.memory = count_recorded(self.memory, self.rounds, held)
        self.loop = Loop(
            self.round, self.rounds, self.scheduler, self.kv, self.planner, self.hosts,
            limits, config.max_num_batched_tokens, depth=2 if ahead else 1,
        )  # fmt: skip

    def _load_proposers(self, chosen: Sequence[tuple[type[Proposer], Any]]) -> list[Proposer]:
        loaded = []
        for kind, options in chosen:
            proposer = kind(options, self.state)
            proposer.load(self.decoder)
            loaded.append(proposer)
        return loaded

    @property
    def drafts_from(self) -> str:
        """Who drafts, and how far at most, for people."""
        parts = [
            f"{proposer.name} (up to {need.longest_draft} {'levels' if need.trees else 'tokens'})"
            for proposer, need in zip(self.proposers, self.round.needs, strict=True)
        ]
        parts += [f"{name} (texts with a grammar)" for name in self.hosts.names]
        return ", ".join(parts) or "nobody"

    @property
    def proposer_names(self) -> tuple[str, ...]:
        """Of all proposers, in the order of their numbers."""
        return (*self.controller.names, *self.hosts.names)

    @property
    def deterministic(self) -> bool:
        """Whether the text of a request with a seed depends on nothing but the request, to the last
        bit of the arithmetic: not on other requests, drafts, or the time."""
        return self.decoder.backend.row_invariant

    @property
    def kv_tokens(self) -> int:
        """How many positions fit in the KV pool."""
        return self.kv.pool.capacity * self.config.block_size

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def prepare(self) -> bool:
        """Something that later rounds would have to wait for, a fraction of a second of it, while
        there is no work. False: nothing is left."""
        return not self.has_work and self.rounds.prepare()

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        speculation: SpeculationParams | None = None,
        choice: int = 0,
        leader: Request | None = None,
        priority: int = 0,
        pools: bool = False,
    ) -> Request:
        """Check a request against this engine; raises SurefootError naming the option at fault.
        ``pools``: the prompt's hidden states are wanted."""
        speculation = speculation or SpeculationParams()
        room = check_texts(
            prompt, params, self.decoder.config.vocab_size, self.max_model_len, self.kv_tokens
        )
        active = (*self.controller.active.values(), *self.hosts.active.values())
        check_speculation(speculation, self.proposer_names, active, self.state.max_drafts)
        drafters = (name for name in self._drafters if name in active and speculation.allows(name))
        seed = params.seed
        if seed is None:
            seed = leader.seed if leader is not None else secrets.randbelow(MAX_SEED)
        return Request(
            request_id=request_id,
            prompt=tuple(prompt),
            grammar=follow(
                params,
                self.grammars,
                self.decoder.config.vocab_size,
                self.decoder.config.eos_token_ids,
                None if leader is None else leader.grammar,
            ),
            params=params,
            speculation=speculation,
            seed=seed,
            max_length=len(prompt) + (params.max_tokens or room),
            end_tokens=self.decoder.config.eos_token_ids,
            choice=choice,
            leader=leader,
            priority=priority,
            pooling=PromptPool() if pools else None,
            drafters=frozenset(drafters),
        )

    @whole
    def settle(self) -> None:
        """What every method does if an exception broke off the one before, and nothing else: drop
        the rounds in flight, and have every request recomputed from its tokens."""

    @whole
    def add(self, request: Request) -> None:
        if not self.has_work:
            self.loop.clock.interrupt()
        self.scheduler.add(request)

    @whole
    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request early (cancelled, or a stop string was found) and free what it holds."""
        self.scheduler.finish(request, reason, stop_reason)

    @whole
    def step(self) -> list[Progress]:
        """Launch what can be launched and read the oldest round. Returns the requests that got
        tokens, finished ones included.

        Whatever it raises, ``KeyboardInterrupt`` included, no request is lost and no text is other
        than it would have been: what is in flight is dropped, and later steps run again what that
        held. ``Request.output`` and ``Request.finished`` then may tell of tokens and ends that no
        step has returned."""
        loop = self.loop
        try:
            while len(loop.flights) < loop.in_flight and loop.launch():
                pass
            if not loop.flights:
                return []
            landing = loop.land()
        finally:
            self.stats.count_admissions(loop)
        self.stats.count_landing(landing, self.rounds.recorded)
        for progress, end in landing.ended:
            self._end(progress.request, _END_REASONS[end])
        return landing.progress

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request whose text has come to its end."""
        stop = request.output[-1] if reason is FinishReason.STOP else None
        if problem := dead_end(request):
            reason, stop = FinishReason.ABORT, f"structured_outputs: {problem}"
        self.scheduler.finish(request, reason, stop)

    def restore(self) -> None:
        """After an exception, wherever it came from: requests keep their tokens, and what else is
        known of them is made anew."""
        self.loop.drop()
        for request in list(self.scheduler.waiting):
            request.settle()
            if (reason := request.end) is not None:
                self._end(request, reason)

    @whole
    def switch_off_failed(self) -> list[str]:
        """Have proposers that raised an exception in a round draft for nobody from now on, and keep
        nothing. Returns their names; requests go on with what is left, to the same texts."""
        controller, hosts = self.controller, self.hosts
        loaded = [(controller.active, item) for item in self.proposers]
        loaded += [(hosts.active, item) for item in hosts.proposers.values()]
        failed: list[str] = []
        for number, (active, proposer) in enumerate(loaded):
            if proposer.has_raised and number in active:
                failed.append(active.pop(number))
        if failed:
            self.restore()
        for request in self.scheduler.waiting:
            request.drafters -= set(failed)
            request.declined -= set(failed)
        return failed

    def check_integrity(self) -> None:
        """Assert that scheduler, KV and slots agree (tests call it after every step)."""
        self.scheduler.check_integrity()
        if self.loop.uploads.waiting:
            return  # Somebody was let in, or got blocks, for a round that has no room yet.
        for request in self.scheduler.running:
            blocks = self.kv.leases[request.request_id].blocks
            assert self.state.block_tables[request.slot, : len(blocks)].tolist() == blocks
        if self.loop.flights:
            return  # The slots are ahead of what was read.
        for request in self.scheduler.running:
            slot: Any = request.slot
            assert int(self.state.length[slot]) == request.length
            assert int(self.state.computed[slot]) == request.computed
            known = self.state.history[slot, : request.length].tolist()
            assert known == request.tokens
