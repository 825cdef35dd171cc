"""The seam between models and the code that runs them: what a decoder needs from a device.

A backend packs weights into its own layout, owns the layout of the paged KV cache, and runs one
decoder layer over a flat batch. ``torch_backend`` is the reference for every other one; each is
held to it by an equivalence test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.kernels.batch import AcceptedPaths, FlatBatch, OutputRows, SpanTable
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.draws import Adjustments, Draws, Maxima, TokenMasks, mask_tokens
from surefoot.kernels.logprobs import ScoredSpans, row_logprobs
from surefoot.kernels.quant import QuantTensor
from surefoot.kernels.reference import rms_norm

__all__ = [
    "AcceptedPaths",
    "AttentionShape",
    "Backend",
    "FlatBatch",
    "LayerWeights",
    "OutputRows",
    "RopeTable",
    "SpanTable",
]
Weight = torch.Tensor | QuantTensor
_NOTHING = nullcontext()


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer; ``scale`` multiplies the scores before the softmax."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class LayerWeights:
    """One decoder block, packed. ``Any`` fields are whatever ``pack_linear`` returned.

    A block whose attention reads something else than the residual stream (see ``Backend.layer``)
    has no ``input_norm``; ``kv`` is the part of ``qkv`` that ``Drafting.write_keys``
    needs.

    y = x + o(attention(rope(norm?(qkv(rms_norm(x))))));  x' = y + down(silu(gate(z)) * up(z)),
    z = rms_norm(y). Biases live inside the packed linears.
    """

    input_norm: torch.Tensor | None
    qkv: Any
    o: Any
    post_norm: torch.Tensor
    gate_up: Any
    down: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    shape: AttentionShape
    kv: Any = None


@dataclass(frozen=True)
class RopeTable:
    """Rotary factors, float32 ``[max_positions, head_dim / 2]``, for the half-split convention:
    out = x * cos + rotate_half(x) * sin, the first half of the head paired with the second."""

    cos: torch.Tensor
    sin: torch.Tensor


class Backend(ABC):
    """Runs decoder layers on one device. Methods neither read tensors on the host nor depend on
    their values for shapes."""

    name: str
    device: torch.device
    dtype: torch.dtype
    """Storage type of dense weights and of the KV cache."""
    row_invariant: bool = False
    """Whether all numbers of a causal row are the same to the bit in any batch, however its text
    is cut into forwards: the arithmetic contract of docs/how-it-works.md."""
    late_rows: int = 0
    """How many rows of committed tokens a drafter's catch-up may wait for while nobody drafts, so
    that its weights are read once for all of them. 0: none; what is recorded cannot wait."""
    runs_beside: bool = False
    """Whether the device runs several kernels at once, so that ``beside`` is of use."""
    book_keeping: str = "torch"
    """Which implementation of ``speculation.books`` goes with it."""

    @property
    @abstractmethod
    def drafting(self) -> Drafting:
        """The operations of proposers beside these."""

    def beside(self, works: Sequence[Callable[[], None]]) -> AbstractContextManager[None]:
        """Do ``works`` while the device does what the context holds; none of all these reads what
        another writes. All are done when whatever is called after the context begins."""
        for work in works:
            work()
        return _NOTHING

    @abstractmethod
    def pack_linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Any:
        """Pack ``[out_i, in]`` matrices as one linear whose outputs are concatenated.
        ``bias`` is ``[sum(out_i)]`` or None."""

    @abstractmethod
    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of an RMSNorm, ``[hidden]`` or ``[head_dim]``, as ``layer`` wants it."""

    @abstractmethod
    def pack_embedding(self, weight: Weight) -> tuple[Any, Any]:
        """An embedding ``[vocab, hidden]`` as (table for ``embed``, linear for a tied head)."""

    def take_rows(self, table: Any, rows: torch.Tensor) -> Any:
        """The rows int64 [M] of a table that ``pack_embedding`` made, as a linear of M outputs. May
        be rounded to other blocks than the table's."""
        return self.pack_linear([self.embed(table, rows.to(self.device))])

    def prepare(self, layers: Sequence[LayerWeights], rows: Sequence[int]) -> None:
        """Before rounds of ``rows`` rows are recorded: find out by measuring how products with the
        weights of ``layers`` are computed fastest. Results do not depend on it."""
        return None

    @abstractmethod
    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, shape: AttentionShape
    ) -> list[Any]:
        """Paged KV for ``layers`` layers. Its layout is the backend's own."""

    def smallest_block(self, shape: AttentionShape) -> int:
        """Least block size of KV that all of its kernels take: with fewer keys a block, sums would
        be in another order, and so texts would not be those of other block sizes. Where it is above
        1, larger ones are powers of two."""
        return 1

    @abstractmethod
    def kv_bytes_per_block(self, block_size: int, shape: AttentionShape) -> int:
        """Bytes that one block takes in one layer, keys and values together."""

    @abstractmethod
    def embed(self, table: Any, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [N] -> hidden states [N, hidden] in the backend's activation type."""

    @abstractmethod
    def layer(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        batch: FlatBatch,
        kv: Any,
        rope: RopeTable,
        inputs: torch.Tensor | None = None,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """One decoder block over the flat batch: [N, hidden] -> [N, hidden], or [M, hidden] of the
        rows ``outputs``. Writes the rows' keys and values into ``kv``. May overwrite ``x``.
        ``inputs`` [N, any width]: what the attention's projections read, as it is, in place of the
        normed ``x``."""

    @abstractmethod
    def move_paths(self, layers: Sequence[Any], paths: AcceptedPaths) -> None:
        """Bring the keys and values of accepted paths together behind the roots of their trees, in
        the KV of all ``layers``."""

    @abstractmethod
    def linear(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """A packed linear by itself: [N, in] -> [N, out] in the backend's activation type."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """An RMSNorm by itself: [N, n] -> [N, n] in ``x``'s dtype; ``weight`` from
        ``pack_norm``."""
        return rms_norm(x, weight, eps)

    def layers(
        self,
        weights: Sequence[LayerWeights],
        x: torch.Tensor,
        batch: FlatBatch,
        kv: Sequence[Any],
        rope: RopeTable,
        capture: Sequence[int],
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``layer`` for one block after another: [N, hidden] -> the last output, [N, hidden] or
        [M, hidden] of the rows ``outputs``, and [N, captured * hidden]: for each index in
        ``capture`` the residual stream entering that block (one past the last: leaving it, of all
        rows), side by side. A backend may fuse the end of a block with the start of the next."""
        last = len(weights) - 1
        features, places = feature_places(x, capture)
        # What the last block makes of other rows nobody reads.
        early = None if last + 1 in places else outputs
        for index, block in enumerate(weights):
            if index in places:
                places[index].copy_(x)
            wanted = early if index == last else None
            x = self.layer(block, x, batch, kv[index], rope, outputs=wanted)
        if last + 1 in places:
            places[last + 1].copy_(x)
        if outputs is not None and (early is None or not weights):
            x = x[outputs.index]
        return x, features

    def target(
        self,
        table: Any,
        weights: Sequence[LayerWeights],
        batch: FlatBatch,
        kv: Sequence[Any],
        rope: RopeTable,
        capture: Sequence[int],
        outputs: OutputRows | None = None,
        head: tuple[torch.Tensor, float, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``embed`` the batch's tokens, and what ``layers`` makes of them; and, where ``head``, the
        first arguments of ``greedy``, is given, perhaps the likeliest tokens behind all rows, int64
        [N]: a backend that spares itself nothing by it leaves them to ``greedy``. All of that may
        be valid until the next call only."""
        x = self.embed(table, batch.tokens)
        return *self.layers(weights, x, batch, kv, rope, capture, outputs), None

    @abstractmethod
    def head(self, norm: torch.Tensor, eps: float, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """Final norm and language-model head: [M, hidden] -> float32 logits [M, vocab]."""

    def head_where_used(
        self,
        norm: torch.Tensor,
        eps: float,
        linear: Any,
        x: torch.Tensor,
        slots: torch.Tensor,
        use: torch.Tensor,
    ) -> tuple[torch.Tensor, Maxima | None]:
        """``head`` for a sampler: the logits of row i, of slot ``slots``[i] (int64 [M]), may be
        anything where the ``use`` of that slot (int64 [slots]) is ``UNREAD`` and the second result
        tells the largest ones."""
        return self.head(norm, eps, linear, x), None

    def greedy(self, norm: torch.Tensor, eps: float, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """The column of each row's largest logit, ``argmax(head(...))``: [M, hidden] -> int64 [M].
        A backend may spare itself the logits."""
        return self.argmax(self.head(norm, eps, linear, x))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Index of each row's largest value, float32 [M, vocab] -> int64 [M]; ties go to the
        lowest index."""
        return logits.argmax(dim=-1)

    def mask_tokens(self, logits: torch.Tensor, masks: TokenMasks) -> None:
        """float32 logits [M, vocab], contiguous, in place: -inf where ``masks`` forbid a token."""
        mask_tokens(logits, masks)

    def row_logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        width: int,
        spans: ScoredSpans | None = None,
    ) -> torch.Tensor:
        """See ``kernels.logprobs``."""
        return row_logprobs(logits, tokens, width, spans)

    def span_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, spans: ScoredSpans, width: int
    ) -> torch.Tensor:
        """``row_logprobs`` of ``spans``, by whichever way scores fewer rows."""
        if len(spans.places) * spans.count < len(logits):
            return self.row_logprobs(logits, tokens, width, spans)
        return self.row_logprobs(logits, tokens, width)[spans.rows(len(logits))]

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor | None:
        """Temperature, filters, noise and argmax at once: float32 logits [M, vocab] -> tokens
        int64 [M], as ``sampling/sampler.py`` says them in torch. None where the device has no
        kernel for it."""
        return None

    def adjust(self, logits: torch.Tensor, adjustments: Adjustments) -> bool:
        """Penalties, bias and masked ends of float32 logits [M, vocab] (or fewer ``columns``),
        contiguous, in place, as ``sampling/sampler.py`` says it in torch. False, and nothing done,
        where the device has no kernel for it."""
        return False


def feature_places(
    x: torch.Tensor, capture: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Room for what ``Backend.layers`` captures of ``x`` [N, width]: [N, captured * width], and by
    layer the columns that are its own."""
    width = x.shape[1]
    features = x.new_empty((len(x), len(capture) * width))
    return features, {at: features[:, i * width :][:, :width] for i, at in enumerate(capture)}
