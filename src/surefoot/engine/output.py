"""From committed tokens to text: detokenising, stop strings, and what users get back."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.models.loading.tokenizer import IncrementalDetokenizer, Tokenizer
from surefoot.request import FinishReason, Request, SpeculationStats, TokenLogprobs


@dataclass
class CompletionOutput:
    """One choice. ``finish_reason`` is ``stop``, ``length``, ``abort``, or None while running;
    ``stop_reason`` the stop string or token id that ended it, None for the model's end token.
    ``proposed_by``: per token, the proposer whose draft it was, None for the target's own."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    proposed_by: list[str | None] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass
class RequestOutput:
    """A prompt and its choices. ``prompt_logprobs`` starts with None: the first token has no
    predecessor."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StreamChunk:
    """New text of choice ``index``, with the tokens committed since the last chunk. Text may lag
    behind the tokens: it waits for whole characters and for possible stop strings.

    ``pieces`` is the same text cut by who proposed it: (text, proposer or None).
    """

    index: int
    text: str
    token_ids: list[int]
    pieces: list[tuple[str, str | None]]
    finish_reason: str | None = None


class TextStream:
    """The text of one request, token by token, exactly the same however tokens are grouped."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()
    ) -> None:
        """``shown``: see ``IncrementalDetokenizer``."""
        self.request = request
        self.text = ""
        self.kept = 0
        self.stopped_by: str | None = None
        self.offsets: list[int] = []
        """Where each kept token's text begins, in characters; a token that adds none begins where
        the next one does."""
        params = request.params
        self._stops = params.stop_strings
        self._sorted_stops = sorted(self._stops)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, shown=shown
        )
        self._sources: list[tuple[int, str | None]] = []
        self._emitted = self._chunked = 0

    @classmethod
    def whole(cls, requests: Sequence[Request], tokenizer: Tokenizer) -> list[TextStream]:
        """The texts of finished requests without stop strings, made at once. Without offsets."""
        streams: list[TextStream] = [cls(request, tokenizer) for request in requests]
        for skip in (False, True):
            alike = [s for s in streams if s.request.params.skip_special_tokens == skip]
            shown = [s.request.output[: -1 if s._hides_last() else None] for s in alike]
            for stream, text in zip(alike, tokenizer.decode_batch(shown, skip), strict=True):
                stream.text, stream.kept = text, len(stream.request.output)
        return streams

    def _hides_last(self) -> bool:
        """Whether the last token ended the text and is no part of it."""
        ended = self.request.finish_reason is FinishReason.STOP
        return ended and not self.request.params.include_stop_str_in_output

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self.stopped_by is not None or (self.request.finished and not self.behind)

    @property
    def behind(self) -> bool:
        """Whether the request has tokens that were not entered."""
        return self.stopped_by is None and self.kept < len(self.request.output)

    def follow(self) -> None:
        """Enter the request's new tokens. Nobody else may be changing it."""
        self.push(self.request.output[self.kept :], last=self.request.finished)

    def chunk(self) -> StreamChunk | None:
        """What was entered since the last one; None: nothing."""
        tokens = self.request.output[self._chunked : self.kept]
        if not tokens:
            return None
        self._chunked = self.kept
        reason = self.output().finish_reason
        pieces = self.take(final=reason is not None)
        return StreamChunk(
            index=self.request.choice,
            text="".join(text for text, _ in pieces),
            token_ids=tokens,
            pieces=pieces,
            finish_reason=reason,
        )

    def push(self, tokens: Sequence[int], last: bool) -> None:
        """Enter committed tokens; ``last`` when the request ended with them. Sets ``stopped_by``
        when a stop string occurs; later tokens are ignored."""
        request, params = self.request, self.request.params
        for index, token in enumerate(tokens):
            if self.stopped_by is not None:
                return
            self.kept += 1
            ends = last and index == len(tokens) - 1
            before = len(self.text)
            self.offsets.append(before)
            if not (ends and self._hides_last()):
                self.text += self._detokenizer.push(token)
            if ends:
                self.text += self._detokenizer.flush()
            self._sources.append((len(self.text), request.proposed_by[self.kept - 1]))
            if self._stops and self.kept > params.min_tokens:
                self._cut_at_stop(before)

    def _cut_at_stop(self, before: int) -> None:
        # A stop string ends in the new text: one that ended within ``min_tokens`` has gone out.
        found = [
            (at, -len(stop), stop)
            for stop in self._stops
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, _, stop = min(found)
            keep = at + len(stop) if self.request.params.include_stop_str_in_output else at
            self.text = self.text[:keep]
            self.stopped_by = stop

    def take(self, final: bool, last: int | None = None) -> list[tuple[str, str | None]]:
        """Text not handed out yet, by source, less what may still turn out to be a stop string; of
        no more than the first ``last`` tokens."""
        limit = len(self.text)
        if not final and self._stops:
            limit = self._safe_length()
        if last is not None and last < self.kept:
            limit = min(limit, self.offsets[last])
        pieces: list[tuple[str, str | None]] = []
        for end, source in self._sources:
            stop = min(end, limit)
            if stop > self._emitted:
                pieces.append((self.text[self._emitted : stop], source))
                self._emitted = stop
        self._sources = [item for item in self._sources if item[0] > self._emitted]
        return pieces

    def _safe_length(self) -> int:
        """Length of the text without the longest tail that is a proper prefix of a stop string."""
        # Places that do not begin such a tail are handed out, so each is looked at once.
        longest = max(map(len, self._stops))
        for at in range(max(self._emitted, len(self.text) - longest + 1), len(self.text)):
            tail = self.text[at:]
            place = bisect.bisect_right(self._sorted_stops, tail)
            if place < len(self._sorted_stops) and self._sorted_stops[place].startswith(tail):
                return at
        return len(self.text)

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation did for the text as it stands."""
        request, kept = self.request, self.kept
        if kept == len(request.output):
            return request.stats
        return request.stats.kept(request.proposed_by[:kept])

    def output(self) -> CompletionOutput:
        """The choice as it stands; tokens after a stop string are cut off."""
        request, kept = self.request, self.kept
        logprobs = None if request.params.logprobs is None else request.logprobs[:kept]
        reason = request.finish_reason
        stop_reason = request.stop_reason
        if stop_reason in request.end_tokens and not request.params.ignore_eos:
            stop_reason = None
        if self.stopped_by is not None:
            reason, stop_reason = FinishReason.STOP, self.stopped_by
        return CompletionOutput(
            index=request.choice,
            text=self.text,
            token_ids=request.output[:kept],
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(x.logprob for x in logprobs),
            proposed_by=request.proposed_by[:kept],
            speculation=self.speculation,
        )
