"""The core process: scheduler and rounds, and nothing that serves text.

Started by ``core_process``. Between rounds it takes what has arrived without waiting; it waits
only while there is nothing to run. Its standard input is a pipe whose other end the front holds: it
closes when the front is gone, however it went.
"""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from surefoot import __version__
from surefoot.engine.build import build_engine, why_slow
from surefoot.engine.engine import Engine, Progress
from surefoot.engine.garbage import only_new_garbage
from surefoot.errors import SurefootError
from surefoot.kernels.backend import Backend
from surefoot.request import FinishReason, Request
from surefoot.sampling.trial import Trial
from surefoot.server import messages
from surefoot.server.compiling import Compiler
from surefoot.server.link import Link
from surefoot.server.log_forwarding import forwarded_log
from surefoot.server.messages import (
    Abort,
    Accepted,
    Add,
    Crashed,
    Failed,
    Loading,
    News,
    Ready,
    Refused,
    Round,
    Start,
    Stop,
    SwitchedOff,
    Totals,
    pack_score,
    pack_scores,
)

Result = TypeVar("Result")
TAKING_SECONDS = 0.01
"""Of a processor, after which arrivals wait for the next round."""


class Core:
    """An engine behind a link."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self.engine = engine
        self.link = link
        self.requests: dict[str, Request] = {}
        grammars = engine.grammars
        trial = None if grammars is None else Trial(grammars)
        self._compiler = Compiler(grammars, trial, link.wake)
        self._proposers = {name: index for index, name in enumerate(engine.proposer_names)}

    def run(self) -> None:
        """Serve until told to stop."""
        resting = preparing = True
        while True:
            message = self.link.receive(wait=not preparing and not self.engine.has_work)
            end = time.thread_time() + TAKING_SECONDS
            while message is not None:
                if not self._handle(message):
                    return
                resting = False
                if self.engine.has_work and time.thread_time() > end:
                    # Those that run do not wait for all who come.
                    break
                message = self.link.receive(wait=False)
            for add, error in self._compiler.ready():
                self._add(add, error)
            if self.engine.has_work:
                resting = False
                progress = self._attempt(self.engine.step)
                if progress is not None:
                    self.link.send(Round([self._news(item) for item in progress], self._totals()))
                continue
            if not resting:
                resting = True
                self.link.send(Round([], self._totals()))
            preparing = preparing and self._attempt(self.engine.prepare) is not False

    def _attempt(self, work: Callable[[], Result]) -> Result | None:
        """None where a proposer failed: it is switched off, and what was broken off runs again
        without it. Proposers run before a round is read, so no news is lost."""
        try:
            return work()
        except Exception as error:
            names = self.engine.switch_off_failed()
            if not names:
                raise
            traceback.print_exc()
            self.link.send(SwitchedOff(names, _in_words(error)))
            return None

    def _handle(self, message: messages.ToCore) -> bool:
        """Returns whether to go on."""
        if isinstance(message, Add):
            if not self._compiler.defer(message):
                self._add(message)
        elif isinstance(message, Abort):
            self._compiler.drop(message.ids)
            for name in message.ids:
                request = self.requests.pop(name, None)
                if request is not None and not request.finished:
                    self.engine.finish(request, FinishReason.ABORT)
        return not isinstance(message, Stop)

    def _add(self, message: Add, error: SurefootError | None = None) -> None:
        group: list[Request] = []
        try:
            if error is not None:
                raise error
            for choice, name in enumerate(message.ids):
                leader = group[0] if group else None
                params = message.params
                if leader is not None and params.prompt_logprobs is not None:
                    # The same for every choice: the first one scores the prompt.
                    params = replace(params, prompt_logprobs=None)
                group.append(
                    self.engine.make_request(
                        name,
                        message.prompt,
                        params,
                        message.speculation,
                        choice,
                        leader,
                        message.priority,
                        message.pools,
                    )
                )
        except SurefootError as error:
            self.link.send(Refused(message.ids, error.option, error.problem, error.fix))
            return
        for request in group:
            self.requests[request.request_id] = request
            self.engine.add(request)
        self.link.send(Accepted(message.ids))

    def _news(self, item: Progress) -> News:
        request, count = item.request, len(item.tokens)
        first = len(request.output) == count
        params = request.params
        if request.finished:
            self.requests.pop(request.request_id, None)
        # What the front has been told is no more needed here.
        scores, request.logprobs = request.logprobs, []
        return News(
            id=request.request_id,
            tokens=list(item.tokens),
            proposer=self._proposers.get(item.drafting.proposer or "", -1),
            offered=item.drafting.offered,
            verified=item.drafting.verified,
            accepted=item.drafting.accepted,
            offerer=self._proposers.get(item.drafting.offerer or "", -1),
            hosted=item.drafting.hosted,
            host=self._proposers.get(item.drafting.host or "", -1),
            finish=request.finish_reason,
            stop=request.stop_reason,
            cached=request.cached if first else 0,
            logprobs=None if params.logprobs is None else [pack_score(score) for score in scores],
            queued=(request.queued_seconds or 0.0) if first else 0.0,
            prompt_logprobs=(
                pack_scores(request.prompt_logprobs)
                if first and params.prompt_logprobs is not None
                else None
            ),
            embedding=None if request.pooling is None else request.pooling.mean,
        )

    def _totals(self) -> Totals:
        engine, stats = self.engine, self.engine.stats
        accounts = engine.planner.accounts
        pool, scheduler = engine.kv.pool, engine.scheduler
        return Totals(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=pool.capacity - pool.num_free,
            blocks=pool.capacity,
            rounds=stats.rounds,
            rows=stats.rows,
            draft_rows=stats.draft_rows,
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            without_drafters=stats.without_drafters,
            probes=accounts.explored,
            barren_rounds=accounts.barren,
            believed_seconds=accounts.believed_seconds,
            measured_seconds=accounts.measured_seconds,
            saved_seconds=accounts.saved_seconds,
        )


def ready(engine: Engine, sampling_defaults: Mapping[str, Any]) -> Ready:
    config, backend = engine.config, engine.decoder.backend
    return Ready(
        description=describe(engine, backend),
        max_model_len=engine.max_model_len,
        kv_tokens=engine.kv_tokens,
        max_num_seqs=config.max_num_seqs,
        max_draft_tokens=engine.state.max_drafts,
        vocab_size=engine.decoder.config.vocab_size,
        end_tokens=tuple(engine.decoder.config.eos_token_ids),
        proposers=list(engine.proposer_names),
        saving_known=bool(engine.proposer_names) and config.draft_policy == "auto",
        deterministic=engine.deterministic,
        sampling_defaults=dict(sampling_defaults),
        build={
            "version": __version__,
            "backend": engine.decoder.backend.name,
            "device": str(engine.decoder.backend.device),
            "dtype": str(engine.decoder.backend.dtype).removeprefix("torch."),
        },
        memory=engine.memory.bytes_by_part() if engine.memory else {},
    )


def describe(engine: Engine, backend: Backend) -> str:
    """The choices and limits that hold, in a few lines for people."""
    config = engine.config
    per_block = backend.kv_bytes_per_block(config.block_size, engine.decoder.shape)
    memory = engine.kv_blocks * per_block * engine.decoder.config.layers
    slow = why_slow(engine)
    return "\n".join(
        (
            f"{backend.name} backend on {backend.device}, "
            f"{str(backend.dtype).removeprefix('torch.')}; drafts from {engine.drafts_from}",
            f"max_model_len {engine.max_model_len} tokens, prompt and answer together",
            f"max_num_seqs {config.max_num_seqs} requests at once",
            f"kv_cache_memory {memory / (1 << 20):.0f} MiB for {engine.kv_tokens} tokens: "
            f"{engine.kv_tokens / engine.max_model_len:.1f} full contexts",
            *([] if slow is None else [slow]),
            *(engine.memory.lines() if engine.memory else ()),
        )
    )


def main(address: str) -> int:
    """Serve the front at ``address``. Returns the exit status."""
    # A Ctrl-C or a service manager's stop goes to the whole group; the front decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(address)
    try:
        return _serve(link)
    finally:
        link.close()


def _serve(link: Link) -> int:
    start = link.receive(wait=True)
    if not isinstance(start, Start):
        return 0
    try:
        with forwarded_log(link.send):
            engine, checkpoint = build_engine(
                start.config, lambda label, done, total: link.send(Loading(label, done, total))
            )
        gc.collect()
        with only_new_garbage():
            link.send(ready(engine, checkpoint.sampling_defaults.values))
            Core(engine, link).run()
    except SurefootError as error:
        link.send(Failed(error.option, error.problem, error.fix))
        return 1
    except Exception as error:
        traceback.print_exc()
        link.send(Crashed(_in_words(error)))
        return 1
    return 0


def _in_words(error: Exception) -> str:
    words = "; ".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
    return " ".join(words.splitlines())
