"""Grammars in a round: what they cut from the offers, and the masks of its rows. Host-side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from surefoot.engine.scheduler import Span
from surefoot.kernels.draws import TokenMasks
from surefoot.request import Request
from surefoot.speculation.controller import Choice, Controller
from surefoot.structured import TextGrammar


def cut_offers(controller: Controller, requests: Sequence[Request]) -> None:
    """Cut the offers for running ``requests`` before the first draft that a grammar forbids, so
    that it is never verified and its chance never counted."""
    structured = [request for request in requests if request.grammar is not None]
    if not structured:
        return
    slots = torch.tensor([r.slot for r in structured], device=controller.lengths.device)
    lengths = controller.lengths[:, slots].tolist()
    tokens = controller.tokens[:, slots].tolist()
    chains = [[list(range(-1, len(row) - 1)) for row in offers] for offers in tokens]
    parents = chains if controller.parents is None else controller.parents[:, slots].tolist()
    kept = [
        [_allowed(*offer) for offer in zip(structured, *offers, strict=True)]
        for offers in zip(tokens, parents, lengths, strict=True)
    ]
    controller.cut(slots, torch.tensor(kept, device=slots.device))


def _allowed(request: Request, drafts: Sequence[int], parents: Sequence[int], length: int) -> int:
    """How many leading drafts of an offer the grammar allows."""
    if not length or request.grammar is None:
        return 0
    request.grammar.sync(request.output)
    if list(parents[:length]) == list(range(-1, length - 1)):
        return request.grammar.allowed_prefix(drafts[:length])
    for node in range(length):
        path = _path(drafts, parents, node)
        if request.grammar.allowed_prefix(path) < len(path):
            return node
    return length


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The drafts from the first to ``node`` of a tree."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _write_masks(
    grammar: TextGrammar, drafts: Sequence[int], parents: Sequence[int], bits: np.ndarray
) -> None:
    """The masks of a span's rows: the current token's, and those behind each draft's own path."""
    if list(parents) == list(range(-1, len(parents) - 1)):
        grammar.write_masks(drafts, bits)
        return
    grammar.write_masks([], bits[:1])
    for node in range(len(drafts)):
        path = _path(drafts, parents, node)
        rows = np.empty((len(path) + 1, bits.shape[1]), dtype=bits.dtype)
        grammar.write_masks(path, rows)
        bits[1 + node] = rows[-1]


def token_masks(
    spans: Sequence[Span],
    first_decoding: int,
    choice: Choice | None,
    vocab_size: int,
    device: torch.device,
) -> TokenMasks | None:
    """Masks of the rows that a round samples, span by span; None if no span has a grammar.

    ``choice`` holds the drafts of the spans from ``first_decoding`` on.
    """
    sampling = [span for span in spans if span.samples]
    if all(span.request.grammar is None for span in sampling):
        return None
    drafts = [] if choice is None else choice.tokens.tolist()
    drafts = [[]] * first_decoding + drafts
    offers = dict(zip(map(id, spans), drafts, strict=False))
    if choice is None or choice.parents is None:
        parents = [list(range(-1, len(row) - 1)) for row in drafts]
    else:
        parents = [[]] * first_decoding + choice.parents.tolist()
    branches = dict(zip(map(id, spans), parents, strict=False))
    counts = [1 + span.drafts if span.request.grammar else 0 for span in sampling]
    bits = np.empty((sum(counts), -(-vocab_size // 32)), dtype=np.int32)
    row: list[int] = []
    first = 0
    for span, count in zip(sampling, counts, strict=True):
        grammar = span.request.grammar
        if grammar is None:
            row += [-1] * (1 + span.drafts)
            continue
        grammar.sync(span.request.output)
        tokens = offers[id(span)][: span.drafts] if span.drafts else []
        above = branches[id(span)][: span.drafts] if span.drafts else []
        _write_masks(grammar, tokens, above, bits[first : first + count])
        row += range(first, first + count)
        first += count
    return TokenMasks(torch.from_numpy(bits).to(device), torch.tensor(row, device=device))


def dead_end(request: Request) -> str:
    """Why a request that an end token ended had no way to complete its text; "" if it did."""
    if request.grammar is None or request.output[-1] not in request.end_tokens:
        return ""
    request.grammar.sync(request.output)
    return request.grammar.problem
