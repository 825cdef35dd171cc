"""Structured output: grammars that a certificate asks for, and what their finished texts must be
by something else than the library that follows them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from surefoot.structured import StructuredOutputsParams, TextGrammar

ADDRESS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}( [a-z]{2,8}){1,5}"
ANSWERS = ("yes", "yes, surely", "no", "no, never")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Structure:
    """``fits`` says whether a whole text is one of the grammar's."""

    params: StructuredOutputsParams
    fits: Callable[[str], bool]


def _is_person(text: str) -> bool:
    value = _parsed(text)
    known = isinstance(value, dict) and value.keys() == {"name", "age"}
    return known and isinstance(value["name"], str) and type(value["age"]) is int


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


STRUCTURES = (
    Structure(StructuredOutputsParams(json=PERSON), _is_person),
    Structure(
        StructuredOutputsParams(json_object=True), lambda text: isinstance(_parsed(text), dict)
    ),
    Structure(
        StructuredOutputsParams(regex=ADDRESS), lambda text: bool(re.fullmatch(ADDRESS, text))
    ),
    Structure(StructuredOutputsParams(choice=ANSWERS), lambda text: text in ANSWERS),
)


def fits(params: StructuredOutputsParams, text: str) -> bool:
    """Whether a finished text fits; True for a grammar that is not the certificate's own."""
    return all(item.fits(text) for item in STRUCTURES if item.params == params)


def allowed_tokens(grammar: TextGrammar, vocab_size: int) -> torch.Tensor:
    """Bool [vocab]: what may follow the tokens that ``grammar`` was last given."""
    bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    grammar.write_masks([], bits)
    flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(flags[0, :vocab_size].astype(bool))
