"""The structures of native.h, as ctypes sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

BAD_INDEX = 2


class Addressed(Protocol):
    """What the C code knows by its address."""

    address: int


def table_of(items: Sequence[Addressed]) -> ctypes.Array[ctypes.c_void_p]:
    """Their addresses, one after the other."""
    return (ctypes.c_void_p * len(items))(*(item.address for item in items))


class SegmentStruct(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("panels", ctypes.c_int32),
        ("panel_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("segments", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("formats", ctypes.c_int32),
        ("segment", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "inner", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "kv_kind")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
    ]


class BatchStruct(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("positions", "key_index", "row_slot")),
        *((name, ctypes.c_void_p) for name in ("span_start", "mask", "tables")),
        ("first_key", ctypes.c_int64),
        ("oldest", ctypes.c_void_p),
    ]


class KVStruct(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("block_size", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
    ]


class CaptureStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("column", "features")),
        ("stride", ctypes.c_int64),
    ]


class ContextStruct(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("capacity", ctypes.c_size_t),
        ("serial_below", ctypes.c_int64),
    ]


class DrawsStruct(ctypes.Structure):
    """``sf_draws`` of sample.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slot", "position")),
        ("slots", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("temperature", "min_p", "top_p")),
        *((name, ctypes.c_void_p) for name in ("top_k", "seed", "choice")),
    ]


class ScoredStruct(ctypes.Structure):
    """``sf_scored`` of scores.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "places", "steps")),
        *((name, ctypes.c_int64) for name in ("spans", "stride", "count")),
    ]


class MasksStruct(ctypes.Structure):
    """``sf_masks`` of adjust.c."""

    _fields_ = [
        ("bits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("words", "entries")),
        *((name, ctypes.c_void_p) for name in ("slot", "first")),
        ("spans", ctypes.c_int64),
        ("masked", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
    ]


class AdjustmentsStruct(ctypes.Structure):
    """``sf_adjustments`` of adjust.c; a stage is off where its pointers are null."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slot", "position")),
        ("slots", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("repetition", "presence", "frequency")),
        *((name, ctypes.c_void_p) for name in ("prompt_length", "history")),
        *((name, ctypes.c_int64) for name in ("history_stride", "max_history")),
        *((name, ctypes.c_void_p) for name in ("bias_ids", "bias")),
        ("biases", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("stop_ids", "min_length")),
        ("stops", ctypes.c_int64),
    ]


class BooksStruct(ctypes.Structure):
    """``sf_books`` of books.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("history", "length", "computed", "limit", "alive")),
        *((name, ctypes.c_void_p) for name in ("draft_limit", "tokens", "lengths", "confidence")),
        *((name, ctypes.c_void_p) for name in ("parents", "allowed", "watched", "watched_bins")),
        *((name, ctypes.c_void_p) for name in ("watched_parents", "watched_length")),
        *((name, ctypes.c_void_p) for name in ("watched_start", "hits", "trials", "seen")),
        *((name, ctypes.c_void_p) for name in ("best_tokens", "best_lengths", "best_proposer")),
        *((name, ctypes.c_void_p) for name in ("best_parents", "best_chances", "report")),
        *((name, ctypes.c_int64) for name in ("width", "slots", "nobody", "proposers", "drafts")),
        *((name, ctypes.c_int64) for name in ("bins", "sure_bins", "vocab", "columns")),
        *((name, ctypes.c_float) for name in ("slot_decay", "global_decay", "least_prior")),
        *((name, ctypes.c_float) for name in ("largest_prior", "least_chance")),
    ]


class LayoutStruct(ctypes.Structure):
    """``layout`` of round.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "row_slot", "first_row")),
        *((name, ctypes.c_void_p) for name in ("sample_index", "sample_slots")),
        *((name, ctypes.c_void_p) for name in ("sample_positions", "first_sample")),
    ]


class LiveStruct(ctypes.Structure):
    """``sf_live`` of draft.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("history", "length", "tables")),
        *((name, ctypes.c_int64) for name in ("width", "blocks", "first", "own", "block_size")),
        *((name, ctypes.c_int64) for name in ("pages", "steps", "behind", "last_position")),
    ]


class VisibleStruct(ctypes.Structure):
    """``sf_visible`` of block.c."""

    _fields_ = [
        ("mask", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("from_anchor", ctypes.c_int64),
    ]


class BlockStruct(ctypes.Structure):
    """``sf_block`` of block.c."""

    _fields_ = [
        ("live", LiveStruct),
        *((name, ctypes.c_void_p) for name in ("table", "mask_embedding", "layer", "kv")),
        *((name, ctypes.c_void_p) for name in ("visible", "norm", "head", "before", "after")),
        *((name, ctypes.c_void_p) for name in ("ids", "of_hidden", "of_token")),
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "first_row", "filler")),
        *((name, ctypes.c_int64) for name in ("first_key", "most_rows")),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale")),
    ]


class FeaturesStruct(ctypes.Structure):
    """``sf_features`` of block.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("fuse", "kv", "norm", "keys")),
        ("layers", ctypes.c_int64),
        ("eps", ctypes.c_float),
    ]
