"""Fields that requests of several endpoints have, and their types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from surefoot.errors import SurefootError
from surefoot.params import MAX_BAD_WORDS, MAX_BIASES, MAX_SEED, MAX_STOP_TOKENS
from surefoot.request import SpeculationParams
from surefoot.server.field_notes import note
from surefoot.server.refusals import NEUTRAL, Neutral, drop_what_asks_for_nothing

MAX_STOPS = 64
SHORT_BODY = 1 << 16
"""Bytes of a body that is read, and worked on, on the spot; see ``Aside``."""
MOST_UNKNOWN = 64
"""Fields looked at for one that is refused; more than are ever accepted for asking nothing."""

REQUEST_ID = "^[!-~]{1,128}$"

StopStrings = Annotated[list[str], Field(max_length=MAX_STOPS)]
# A list of a million mistakes is told of the first.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Strict(BaseModel):
    """Of JSON's own types: no text where a number belongs, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_most_unknown(cls, data: Any) -> Any:
        """Pydantic would complain of each of a million."""
        if not isinstance(data, dict) or len(data) <= MOST_UNKNOWN:
            return data
        fields = cls.model_fields.items()
        known = {*cls.model_fields, *(field.alias for _, field in fields if field.alias)}
        dropped = {*[name for name in data if name not in known][MOST_UNKNOWN:]}
        return {name: value for name, value in data.items() if name not in dropped}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        note(handler.resolve_ref_schema(schema).get("properties", {}))
        return schema


def at_most(count: int) -> BeforeValidator:
    """Of so many members, counted before they are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            problem = f"has {len(value)} members, more than {count}"
            raise PydanticCustomError("too_long", "{problem}", {"problem": problem})
        return value

    return BeforeValidator(check)


class SpeculationField(Strict):
    method: str = "auto"
    max_draft_tokens: int | None = None


class Body(Strict):
    """A request's body."""

    _large: bool = PrivateAttr(default=False)

    @property
    def large(self) -> bool:
        """Whether work on it is to be done where nobody waits for it."""
        return self._large

    def came_as(self, size: int) -> None:
        """Note that it came as so many bytes."""
        self._large = size > SHORT_BODY


class Tolerant(Body):
    """A request that may hold fields of other servers, if their values ask for nothing."""

    # See ``refusals``.
    neutral: ClassVar[Neutral] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return drop_what_asks_for_nothing(data, cls.model_fields, cls.neutral)


class GenerationFields(Tolerant):
    """What all endpoints that generate have in common; None means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)] | None
    ) = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Ids | None = None
    truncate_prompt_tokens: int | None = None
    """The last so many tokens of a prompt are taken; -1: as many as there is room for."""
    priority: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    """Lower ones are let in first."""
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    stream: bool | None = None
    speculation: SpeculationField | str | None = None

    def shared(self) -> dict[str, Any]:
        """These fields, as far as they were given, for a request of another endpoint."""
        return self.model_dump(include=set(GenerationFields.model_fields), exclude_unset=True)

    def speculation_params(self, header: str | None) -> SpeculationParams:
        """Of the field or of the header ``surefoot-speculation``. Raises SurefootError."""
        if header is not None:
            if self.speculation is not None:
                raise SurefootError(
                    "speculation", "is given as a field and as a header", "drop one of them"
                )
            return read_speculation_header(header)
        if isinstance(self.speculation, SpeculationField):
            return SpeculationParams.of(self.speculation.model_dump())
        return SpeculationParams.of(self.speculation)


def read_speculation_header(text: str) -> SpeculationParams:
    """``off``, ``auto`` or a proposer's name, then perhaps ``; max_draft_tokens=4``."""
    method, *options = (part.strip() for part in text.split(";"))
    limit = None
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        if name != "max_draft_tokens" or not value.isdecimal() or limit is not None:
            raise SurefootError(
                "surefoot-speculation", f"{option!r} is unknown", "use max_draft_tokens=N"
            )
        limit = int(value)
    return SpeculationParams(method, limit)
