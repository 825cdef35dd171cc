"""Fields of completions and chat completions. Unknown fields are refused, and so are values that
cannot be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from surefoot.errors import SurefootError
from surefoot.request import SamplingParams
from surefoot.server.fields import GenerationFields, Ids, StopStrings, Strict, Texts
from surefoot.structured import StructuredOutputsParams


class SurefootField(Strict):
    """What to report beside the text."""

    proposed_by: bool = False


class JsonSchemaFormat(Strict):
    """``strict`` changes nothing: the text fits the schema either way."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(Strict):
    """vLLM's; see ``surefoot.structured``."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """``usage`` so far in every chunk."""
    include_obfuscation: Literal[False] = False


class RequestFields(GenerationFields):
    """What chat and plain completions have in common; None means the default."""

    n: int | None = None
    max_tokens: int | None = None
    stop: str | StopStrings | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    surefoot: SurefootField | None = None
    return_token_ids: bool | None = None

    # Options by their names here.
    option_names: ClassVar[Mapping[str, str]] = {}

    def sampling(
        self, defaults: Mapping[str, Any], room: int, more: Mapping[str, Any]
    ) -> SamplingParams:
        """The sampling parameters: the request's, overridden by ``more``; for what is None then,
        ``defaults`` (with ``room``, see ``SamplingParams.with_defaults``). Raises SurefootError."""
        if self.stream_options is not None and not self.stream:
            raise SurefootError("stream_options", "does nothing without stream", "drop it")
        if self.continuous_usage and not self.include_usage:
            option = "stream_options.continuous_usage_stats"
            raise SurefootError(option, "needs include_usage", "set both")
        values = {
            name: getattr(self, name)
            for name in SamplingParams.__dataclass_fields__
            if name in type(self).model_fields
        }
        values["logit_bias"] = self._logit_bias()
        values["structured_outputs"] = structured_outputs(self)
        given = {name: v for name, v in {**values, **more}.items() if v is not None}
        return SamplingParams.with_defaults(given, defaults, room)

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        if not all(key.isascii() and key.isdigit() for key in self.logit_bias):
            raise SurefootError("logit_bias", "has a key that is no token id", "use whole numbers")
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def names(self) -> dict[str, str]:
        """The request's fields by Surefoot's names of options, where they differ."""
        fields = structure_fields(self)
        given = {f"structured_outputs.{kind}": name for name, kind, _ in fields}
        if self.structured_outputs is not None:
            given = {}
        elif fields:
            given["structured_outputs"] = fields[0][0]
        return {**type(self).option_names, **given}

    @property
    def wants_sources(self) -> bool:
        return self.surefoot is not None and self.surefoot.proposed_by

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(RequestFields):
    prompt: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    best_of: int | None = None
    """So many texts are generated, and the ``n`` of them with the highest mean logprob kept."""

    @property
    def texts(self) -> int:
        """How many are generated for each prompt. Raises SurefootError."""
        kept = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == kept:
            return kept
        if self.best_of < kept:
            raise SurefootError("best_of", f"is less than n, {kept}", f"use at least {kept}")
        if self.stream:
            raise SurefootError(
                "best_of", "cannot be streamed: texts are compared by their ends", "drop stream"
            )
        return self.best_of

    def names(self) -> dict[str, str]:
        """See ``RequestFields.names``."""
        return super().names() | ({} if self.best_of is None else {"n": "best_of"})


def structure_fields(request: RequestFields) -> list[tuple[str, str, Any]]:
    """The fields that ask for structured output: their names, the kinds in
    ``StructuredOutputsParams``, and what they ask for."""
    found: list[tuple[str, str, Any]] = []
    form = request.response_format
    if form is not None:
        if form.json_schema is not None:
            found.append(("response_format", "json", form.json_schema.schema_))
        elif form.type == "json_object":
            found.append(("response_format", "json_object", True))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            found.append((f"guided_{kind}", kind, value))
    return found


def structured_outputs(request: RequestFields) -> StructuredOutputsParams | None:
    """What the text has to fit. Raises SurefootError for more than one wish."""
    form = request.response_format
    if form is not None and (form.json_schema is None) == (form.type == "json_schema"):
        problem = "is missing" if form.json_schema is None else f"does nothing for {form.type}"
        raise SurefootError("response_format.json_schema", problem)
    fields = structure_fields(request)
    given = request.structured_outputs
    names = [name for name, _, _ in fields] + ["structured_outputs"] * (given is not None)
    if len(names) > 1:
        raise SurefootError(names[1], f"does not go with {names[0]}", "give one of them")
    if given is not None:
        values = given.model_dump(by_alias=True)
        return StructuredOutputsParams(**{**values, "json_object": bool(given.json_object)})
    if not fields:
        return None
    [(_, kind, value)] = fields
    return StructuredOutputsParams(**{kind: value})
