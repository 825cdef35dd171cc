"""Embeddings: what is asked for, and how it is told.

One is the mean of the last hidden states of all tokens of a prompt, behind the model's final norm,
and then of length 1. They come out of the same rounds as texts: a prompt runs chunk by chunk beside
everybody else's.
"""

from __future__ import annotations

import base64
import math
import struct
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from surefoot.params import MAX_SEED
from surefoot.server.answer import WholeFormat
from surefoot.server.fields import REQUEST_ID, Ids, Texts, Tolerant
from surefoot.server.generation import Generation
from surefoot.server.refusals import Neutral
from surefoot.server.schema import CompletionRequest
from surefoot.server.translating import told


class EmbeddingRequest(Tolerant):
    """``/v1/embeddings``."""

    model: str | None = None
    input: str | Ids | Texts | list[Ids]
    """A text, a list of token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool = True
    """Whether an embedding has length 1; else it is the mean itself."""
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """The last so many tokens are taken; -1: as many as there is room for."""
    priority: int | None = Field(default=None, ge=-MAX_SEED, le=MAX_SEED)
    """Lower ones are let in first."""
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)

    _completion: CompletionRequest | None = PrivateAttr(default=None)

    neutral: ClassVar[Neutral] = {
        "dimensions": ((None,), "drop it: embeddings are as wide as the model's hidden states"),
    }

    @model_validator(mode="after")
    def _translate(self) -> Self:
        if self._completion is not None:
            # FastAPI has it looked at once more.
            return self
        shared = {"add_special_tokens", "truncate_prompt_tokens", "priority", "request_id"}
        fields = self.model_dump(include=shared)
        # One token comes with the prompt's end, and is left out.
        fields |= {"prompt": self.input, "max_tokens": 1, "temperature": 0}
        try:
            self._completion = CompletionRequest.model_validate(fields)
        except ValidationError as error:
            raise told(error, "", self.named) from None
        return self

    @property
    def completion(self) -> CompletionRequest:
        """A request for texts of the same prompts."""
        assert self._completion is not None
        return self._completion

    def came_as(self, size: int) -> None:
        """See ``Body``."""
        super().came_as(size)
        self.completion.came_as(size)

    def named(self, option: str) -> str:
        """A field of that request by its name here."""
        return "input" if option == "prompt" else option


class EmbeddingFormat(WholeFormat):
    """OpenAI's."""

    def __init__(self, model: str, request: EmbeddingRequest) -> None:
        self.model = model
        self.request = request

    def whole(self, generation: Generation) -> dict[str, Any]:
        """See ``WholeFormat``."""
        data = [
            {"object": "embedding", "index": item.index, "embedding": self._told(item.embedding)}
            for item in generation.choices
        ]
        count = sum(map(len, generation.prompts))
        used = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.model, "usage": used}

    def _told(self, mean: list[float] | None) -> list[float] | str:
        assert mean is not None
        length = math.hypot(*mean) if self.request.normalize else 1.0
        packed = struct.pack(f"<{len(mean)}f", *(value / (length or 1.0) for value in mean))
        if self.request.encoding_format == "base64":
            return base64.b64encode(packed).decode()
        return list(struct.unpack(f"<{len(mean)}f", packed))
