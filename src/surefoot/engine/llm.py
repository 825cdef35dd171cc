"""The offline surface: ``LLM.generate``, ``LLM.chat`` and ``LLM.stream``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from surefoot.config import EngineConfig
from surefoot.engine.build import ProgressCallback, build_engine
from surefoot.engine.garbage import only_new_garbage
from surefoot.engine.output import RequestOutput, StreamChunk, TextStream
from surefoot.engine.turns import Turns
from surefoot.errors import SurefootError
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Speculation = SpeculationParams | Mapping[str, Any] | str | None

_PAUSE = 0.1
"""Seconds between two reports of progress."""


class LLM:
    """A model ready to generate, with exact speculation always at hand.

    ``options`` are the fields of ``EngineConfig``; unknown names are refused. ``progress`` is
    called with (label, done, total) during downloads and conversions. Conversions that take space
    in the cache folder, what cannot be kept there, and the model's sampling defaults are logged
    (``logging``, "surefoot").

    Calls share one continuous batch. Streams may be read in turn, ``generate`` called while they
    are open, and all of it from several threads: rounds run one after the other, each for all
    requests there are, so that whoever waits brings the others' texts on, too. What is not read yet
    is kept. If a round raises (a proposer of yours, no memory, Ctrl-C), the call that ran it raises
    that, and its requests end; all others go on, and get the texts that they would have got.
    """

    def __init__(
        self, model: str | None = None, *, progress: ProgressCallback | None = None, **options: Any
    ) -> None:
        if model is not None:
            options["model"] = model
        self.config = EngineConfig.from_dict(options)
        self.engine, checkpoint = build_engine(self.config, progress)
        self.config = self.engine.config
        self.tokenizer = checkpoint.tokenizer
        self.sampling_defaults = checkpoint.sampling_defaults.values
        self._ids = itertools.count()
        self._turns = Turns(self.engine)

    def default_sampling_params(self) -> SamplingParams:
        """Where ``generate``, ``chat`` and ``stream`` are given no parameters, they take these (and
        fewer ``max_tokens`` where the context has no room for them): what the model recommends, or
        with ``generation_config="none"`` ``SamplingParams()``."""
        return SamplingParams(**self.sampling_defaults)

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens a text may have after ``prompt``; none or fewer: it is too long."""
        return min(self.engine.max_model_len, self.engine.kv_tokens) - len(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many (text, token ids, or ``{"prompt": …}`` /
        ``{"prompt_token_ids": …}``), all in one continuous batch, in the order given.

        ``sampling_params`` and ``speculation`` apply to all prompts, or are lists as long. Without
        ``sampling_params`` those of ``default_sampling_params`` are taken.
        ``on_progress`` is called with (finished, total) prompts. Bad input raises SurefootError
        before anything runs.
        """
        many = _as_list(prompts)
        params = _spread("sampling_params", sampling_params, len(many))
        choices = _spread("speculation", speculation, len(many))
        groups = [self._group(*args) for args in zip(many, params, choices, strict=True)]
        requests = [request for _, group in groups for request in group]
        streams = {
            request.request_id: TextStream(request, self.tokenizer)
            for request in requests
            if request.params.stop_strings
        }
        try:
            with only_new_garbage():
                self._turns.take(lambda: self._add(requests))
                self._run(groups, list(streams.values()), on_progress)
        except BaseException:
            self._turns.cancel(requests)
            raise
        unread = [r for _, group in groups for r in group if r.request_id not in streams]
        for stream in TextStream.whole(unread, self.tokenizer):
            streams[stream.request.request_id] = stream
        return [_output(text, group, streams) for text, group in groups]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] = None,
        on_progress: Callable[[int, int], None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Like ``generate``, for one conversation or a list of them, through the chat template."""
        if not messages:
            raise SurefootError("messages", "is empty", "give at least one message")
        one = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [self.render_chat(talk, **template_options) for talk in conversations]
        return self.generate(
            prompts, sampling_params, speculation=speculation, on_progress=on_progress
        )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template, reply prompt included."""
        text = self.tokenizer.render_chat(list(messages), **template_options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: Speculation = None,
    ) -> Generator[StreamChunk, None, None]:
        """Yield text as it is committed; what others' rounds brought meanwhile comes at once.
        Closing the iterator cancels the request, and nobody else's."""
        _, group = self._group(prompt, sampling_params, speculation)
        streams = [TextStream(request, self.tokenizer) for request in group]
        try:
            self._turns.take(lambda: self._add(group))
            while not all(stream.ended for stream in streams):
                yield from self._turns.take(lambda: self._read(streams))
        finally:
            self._turns.cancel(group)

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.add(request)

    def _read(self, streams: Sequence[TextStream]) -> list[StreamChunk]:
        """What is new, after a round if nothing was."""
        if not any(stream.behind for stream in streams):
            self.engine.step()
        self._follow(streams)
        return [chunk for stream in streams if (chunk := stream.chunk()) is not None]

    def _group(
        self, prompt: Prompt, params: SamplingParams | None, speculation: Speculation
    ) -> tuple[str | None, list[Request]]:
        """The requests of one prompt: one per choice, the first leading."""
        text, tokens = self._tokenize(prompt)
        if params is None:
            params = SamplingParams.with_defaults({}, self.sampling_defaults, self.room(tokens))
        chosen = SpeculationParams.of(speculation)
        name = f"request-{next(self._ids)}"
        group: list[Request] = []
        for choice in range(params.n):
            leader = group[0] if group else None
            request_id = f"{name}-{choice}"
            group.append(
                self.engine.make_request(request_id, tokens, params, chosen, choice, leader)
            )
        return text, group

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise SurefootError("prompt", "lacks both 'prompt' and 'prompt_token_ids'")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        return None, [int(token) for token in prompt]

    def _run(
        self,
        groups: Sequence[tuple[str | None, Sequence[Request]]],
        streams: Sequence[TextStream],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Rounds until all requests have ended. ``streams``: of those with stop strings."""
        requests = [request for _, group in groups for request in group]
        first, told = 0, time.monotonic()

        def unfinished() -> bool:
            # Those before the first have ended: looking at all of many in every round takes long.
            nonlocal first
            while first < len(requests) and requests[first].finished:
                first += 1
            return first < len(requests)

        def go_on() -> None:
            # Others' rounds may have ended the last ones.
            if unfinished():
                self.engine.step()
            self._follow(streams)

        while unfinished() or any(stream.behind for stream in streams):
            self._turns.take(go_on)
            if on_progress is None or (unfinished() and time.monotonic() - told < _PAUSE):
                continue
            told = time.monotonic()
            finished = sum(all(r.finished for r in group) for _, group in groups)
            on_progress(finished, len(groups))

    def _follow(self, streams: Sequence[TextStream]) -> None:
        """Read what is new, and end requests whose stop string occurred."""
        for stream in streams:
            if stream.behind:
                stream.follow()
                if stream.stopped_by is not None:
                    self.engine.finish(stream.request, FinishReason.STOP, stream.stopped_by)


def _output(
    text: str | None, group: Sequence[Request], streams: Mapping[str, TextStream]
) -> RequestOutput:
    first = group[0]
    scores = None
    if first.params.prompt_logprobs is not None:
        scores = [None, *first.prompt_logprobs]
    return RequestOutput(
        request_id=first.request_id.rsplit("-", 1)[0],
        prompt=text,
        prompt_token_ids=list(first.prompt),
        outputs=[streams[request.request_id].output() for request in group],
        finished=all(request.finished for request in group),
        prompt_logprobs=scores,
        num_cached_tokens=first.cached,
    )


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if not items:
        raise SurefootError("prompts", "is empty", "give at least one prompt")
    return [items] if isinstance(items[0], int) else items


def _spread(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise SurefootError(name, f"has {len(value)} entries for {count} prompts")
        return list(value)
    return [value] * count
