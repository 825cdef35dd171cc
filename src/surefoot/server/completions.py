"""Plain completions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from surefoot.request import TokenLogprobs
from surefoot.server.answer import Delta
from surefoot.server.choices import ChoicesFormat
from surefoot.server.generation import Choice, Generation
from surefoot.server.logprobs import Offsets, TokenTexts, completion_logprobs, prompt_logprobs
from surefoot.server.schema import CompletionRequest
from surefoot.server.usage import speculation

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_ALWAYS = 5
"""Fields of every choice: index, text, logprobs and the two reasons."""


class CompletionFormat(ChoicesFormat):
    """``echo`` puts the prompt before each text; ``scoring`` leaves only the prompt."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: CompletionRequest,
        prompts: list[str],
        texts: TokenTexts,
        scoring: bool,
    ) -> None:
        super().__init__(answer_id, model, request)
        self.request = request
        self.prompts = prompts
        """Texts of the prompts, where they are to be echoed."""
        self.texts = texts
        self.hidden = scoring
        self._offsets: dict[int, Offsets] = {}

    def chosen(self, generation: Generation) -> list[Choice]:
        """Of ``best_of`` texts to each prompt, those with the highest mean logprobs."""
        made, kept = generation.params.n, self.request.n or 1
        if made == kept:
            return generation.choices
        groups = (generation.choices[i : i + made] for i in range(0, len(generation.choices), made))
        best = (sorted(group, key=Choice.mean_logprob, reverse=True) for group in groups)
        return [choice for group in best for choice in group[:kept]]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        entry = self.entry(choice, delta)
        tells = entry["text"] or entry["finish_reason"] or entry["logprobs"]
        # Held-back text is no news, but what was asked for by token is.
        return [entry] if tells or len(entry) > _ALWAYS else []

    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        request = self.request
        prompt = choice.index // choice.generation.params.n
        begins = delta.first == 0
        text = "" if self.hidden else delta.text
        if request.echo and begins:
            text = self.prompts[prompt] + text
        reason = delta.finish_reason
        if self.hidden and reason is not None:
            reason = "length"
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": choice.output().stop_reason if reason else None,
        }
        if request.logprobs is not None:
            entry["logprobs"] = self._logprobs(choice, delta, prompt, begins)
        last = delta.first if self.hidden else delta.last
        if request.prompt_logprobs is not None and begins:
            scores = choice.generation.prompt_logprobs(prompt)
            entry["prompt_logprobs"] = prompt_logprobs(self.texts, scores)
        if request.return_token_ids:
            entry["token_ids"] = choice.request.output[delta.first : last]
            if begins:
                entry["prompt_token_ids"] = list(choice.request.prompt)
        if request.wants_sources:
            entry["surefoot"] = sources(choice, delta)
        return entry

    def _logprobs(self, choice: Choice, delta: Delta, prompt: int, begins: bool) -> dict[str, Any]:
        request = choice.request
        if choice.index not in self._offsets:
            skip, start = request.params.skip_special_tokens, 0
            self._offsets[choice.index] = Offsets(self.texts.tokenizer, skip, start)
        last = delta.first if self.hidden else delta.last
        tokens = list(request.output[delta.first : last])
        scores: Iterable[TokenLogprobs | None] = choice.logprobs(delta.first, last)
        if self.request.echo and begins:
            tokens = [*request.prompt, *tokens]
            scores = chain(choice.generation.prompt_logprobs(prompt), scores)
        return completion_logprobs(self.texts, tokens, scores, self._offsets[choice.index])


def sources(choice: Choice, delta: Delta) -> dict[str, Any]:
    """Who proposed these tokens, and the text cut by that; None: the target itself. Per token
    also its place in the draft, from 1, and where its text begins in the choice's. ``speculation``
    counts from the choice's beginning up to here."""
    tokens = slice(delta.first, delta.last)
    return {
        "proposed_by": choice.request.proposed_by[tokens],
        "draft_positions": choice.draft_positions[tokens],
        "text_offset": choice.stream.offsets[tokens],
        "pieces": [list(piece) for piece in delta.pieces],
        "speculation": speculation([choice.stream.speculation]),
    }
