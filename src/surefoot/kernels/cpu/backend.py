"""The native CPU backend: one C call for all decoder layers, GGUF blocks kept packed.

Results are row-invariant: a row's output bits depend on its token, its position and the keys that
it sees, never on the rest of the batch, the chunking of the prefill, the paging or the number of
threads. Verified spans therefore equal plain decoding bit for bit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import (
    AcceptedPaths,
    AttentionShape,
    Backend,
    FlatBatch,
    LayerWeights,
    OutputRows,
    RopeTable,
    Weight,
)
from surefoot.kernels.cpu import sampling
from surefoot.kernels.cpu.build import load_native, native_unavailable
from surefoot.kernels.cpu.drafting import NativeDrafting
from surefoot.kernels.cpu.huge_pages import WeightMemory
from surefoot.kernels.cpu.kv import NativeKV, allocate, bytes_per_block, move_keys
from surefoot.kernels.cpu.linear import (
    DENSE_KINDS,
    KINDS,
    NativeLinear,
    floats,
    input_of,
    pack_part,
)
from surefoot.kernels.cpu.prepare import (
    PreparedBatch,
    PreparedLayer,
    PreparedLayers,
    prepare_batch,
    prepare_layer,
)
from surefoot.kernels.cpu.structs import BAD_INDEX, ContextStruct
from surefoot.kernels.draws import Adjustments, Draws, TokenMasks
from surefoot.kernels.logprobs import ScoredSpans
from surefoot.kernels.quant import QuantTensor
from surefoot.kernels.reference import key_moves

SERIAL_BELOW = 1 << 19
FEW_ROWS = 16
"""Of a target's pass, at most, whose results lie where the last one's lay."""
MOST_PREPARED = 64
"""Batches, and stacks of layers, whose addresses are kept."""


class NativeBackend(Backend):
    """Runs on the CPU with the compiled kernels; activations are float32.

    ``dtype`` (float32 or bfloat16) stores dense weights and the KV cache; GGUF blocks stay packed
    and meet activations quantised to int8 per row and 32 columns. ``threads`` None follows torch's
    number. Not for concurrent calls: scratch memory is shared between them.

    Raises SurefootError when the kernels are not available or ``dtype`` is another one.
    """

    name = "native"
    row_invariant = True
    book_keeping = "native"
    late_rows = 128

    def __init__(self, dtype: torch.dtype = torch.float32, threads: int | None = None) -> None:
        self.threads = threads
        library = load_native()
        if library is None:
            raise SurefootError(
                "backend",
                f"the native CPU kernels are not available: {native_unavailable()}",
                "use the torch backend",
            )
        if dtype not in DENSE_KINDS:
            raise SurefootError(
                "dtype", f"{dtype} is not supported on this backend", "use float32 or bfloat16"
            )
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.library = library
        self._weights = WeightMemory()
        self._context = ContextStruct(None, 0, SERIAL_BELOW)
        self.context_address = ctypes.addressof(self._context)
        self._work = ContextStruct(None, 0, SERIAL_BELOW)
        self.work_address = ctypes.addressof(self._work)
        """Memory for what lies between calls that use the other."""
        self._batches: dict[int, PreparedBatch] = {}
        """By what identifies a batch, which they keep alive. Rounds of few rows write into the
        batches of earlier ones."""
        self._layers: dict[int, PreparedLayers] = {}
        """By the address of the first one's keys."""
        self._passes: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}
        """As of ``_room``."""
        weakref.finalize(self, _release, library, self._work)
        weakref.finalize(self, _release, library, self._context)

    @property
    def thread_count(self) -> int:
        """How many threads a call uses at most."""
        return self.threads or torch.get_num_threads()

    @property
    def drafting(self) -> NativeDrafting:
        return NativeDrafting(self)

    @property
    def serial_below(self) -> int:
        """Multiplications below which a call stays on one thread (0: never). Results are the
        same."""
        return self._context.serial_below

    @serial_below.setter
    def serial_below(self, multiplications: int) -> None:
        self._context.serial_below = multiplications

    @property
    def isa(self) -> str:
        """The instruction set that the kernels were compiled for."""
        return self.library.sf_isa().decode()

    def pack_linear(
        self, parts: Sequence[Weight], bias: torch.Tensor | None = None
    ) -> NativeLinear:
        """Parts ``[out_i, in]``, dense or GGUF, in any mixture; ``bias`` ``[sum(out_i)]``.
        ValueError when their inputs differ."""
        if len({part.shape[1] for part in parts}) != 1:
            raise ValueError(f"parts of one linear differ in inputs: {[p.shape for p in parts]}")
        kept = None if bias is None else bias.detach().float().contiguous()
        how = self.dtype, self._weights, self.thread_count
        return NativeLinear([pack_part(self.library, part, *how) for part in parts], kept)

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        """float32, contiguous."""
        return weight.detach().to("cpu", torch.float32).contiguous()

    def pack_embedding(self, weight: Weight) -> tuple[NativeLinear, NativeLinear]:
        """Table and tied head are the same packed matrix."""
        packed = self.pack_linear([weight])
        return packed, packed

    def take_rows(self, table: NativeLinear, rows: torch.Tensor) -> NativeLinear:
        """Of blocks as Q8_0, which is exact for Q8_0 and needs no more bytes than it has to."""
        found = self.embed(table, rows)
        packed = table.segments[0].kind > KINDS["BF16"]
        return self.pack_linear([QuantTensor.of(found) if packed else found])

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, shape: AttentionShape
    ) -> list[NativeKV]:
        """One ``NativeKV`` per layer. ValueError for a head_dim that is not a multiple of 16 up to
        256."""
        return allocate(layers, blocks, block_size, shape, self.dtype)

    def kv_bytes_per_block(self, block_size: int, shape: AttentionShape) -> int:
        """Blocks are stored in tiles of 16 keys, so other sizes are rounded up to that."""
        return bytes_per_block(block_size, shape, self.dtype)

    def embed(self, table: NativeLinear, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [N] -> float32 [N, hidden]. IndexError for a token outside the table."""
        tokens = tokens.contiguous()
        out = torch.empty(tokens.shape[0], table.shape[1])
        code = self.library.sf_embed(
            ctypes.addressof(table.segments),
            tokens.data_ptr(),
            tokens.shape[0],
            out.data_ptr(),
            self.thread_count,
        )
        if code == BAD_INDEX:
            raise IndexError(f"a token is outside the vocabulary of {table.shape[0]}")
        return out

    def layer(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        batch: FlatBatch,
        kv: NativeKV,
        rope: RopeTable,
        inputs: torch.Tensor | None = None,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """x float32 [N, hidden], overwritten with the result (a copy when not contiguous), of which
        only the first M rows are returned where ``outputs`` are given. MemoryError when scratch
        memory cannot be had."""
        if inputs is not None:
            inputs = input_of(inputs, weights.qkv)
        x = floats(x)
        return self.run(self._prepared(weights, rope), kv.table, x, batch, inputs, outputs)

    def _prepared(self, weights: LayerWeights, rope: RopeTable) -> PreparedLayer:
        prepared = weights.qkv.prepared
        if prepared is None or prepared.weights is not weights or prepared.rope is not rope:
            prepared = prepare_layer(weights, rope, KINDS[DENSE_KINDS[self.dtype]])
        return prepared

    def layers(
        self,
        weights: Sequence[LayerWeights],
        x: torch.Tensor,
        batch: FlatBatch,
        kv: Sequence[NativeKV],
        rope: RopeTable,
        capture: Sequence[int],
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Backend.layers``. MemoryError when scratch memory cannot be had."""
        if not weights:
            return super().layers(weights, x, batch, kv, rope, capture, outputs)
        prepared = self._prepared_layers(weights, kv, rope)
        count, hidden = len(weights), x.shape[1]
        x = floats(x)
        features = torch.empty(len(x), len(capture) * hidden)
        leaving = count in capture
        # What the last block makes of other rows nobody reads, unless it is captured.
        early = None if leaving else outputs
        address = prepared.capture(capture, hidden, features) if capture else None
        x = self.run(prepared, prepared.kv_table, x, batch, None, early, address, count)
        if leaving:
            at = capture.index(count) * hidden
            features[:, at : at + hidden] = x
        if outputs is not None and leaving:
            x = x[outputs.index]
        return x, features

    def _prepared_layers(
        self, weights: Sequence[LayerWeights], kv: Sequence[NativeKV], rope: RopeTable
    ) -> PreparedLayers:
        prepared = self._layers.get(kv[0].address)
        if prepared is None or not prepared.are(weights, kv, rope):
            prepared = PreparedLayers([self._prepared(each, rope) for each in weights], kv)
            if len(self._layers) >= MOST_PREPARED:
                self._layers.clear()
            self._layers[kv[0].address] = prepared
        return prepared

    def target(
        self,
        table: NativeLinear,
        weights: Sequence[LayerWeights],
        batch: FlatBatch,
        kv: Sequence[NativeKV],
        rope: RopeTable,
        capture: Sequence[int],
        outputs: OutputRows | None = None,
        head: tuple[torch.Tensor, float, NativeLinear] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See ``Backend.target``: one call, where the likeliest tokens of all rows are wanted; what
        it returns then is valid until the next one."""
        count = len(weights)
        if head is None or outputs is not None or not count or count in capture:
            return super().target(table, weights, batch, kv, rope, capture, outputs)
        prepared = self._prepared_layers(weights, kv, rope)
        tokens, hidden, (norm, eps, linear) = batch.tokens.contiguous(), table.shape[1], head
        x, features, found = self._room(tokens.shape[0], hidden, len(capture))
        code = self.library.sf_target(
            self.context_address,
            ctypes.addressof(table.segments),
            tokens.data_ptr(),
            prepared.table,
            count,
            self.prepared_batch(batch).address,
            prepared.kv_table,
            x.data_ptr(),
            prepared.capture(capture, hidden, features) if capture else None,
            norm.data_ptr(),
            eps,
            linear.address,
            found.data_ptr(),
            self.thread_count,
        )
        if code == BAD_INDEX:
            raise IndexError(f"a token is outside the vocabulary of {table.shape[0]}")
        if code:
            raise MemoryError("no memory for a target's intermediate results")
        return x, features, found

    def _room(self, rows: int, hidden: int, captured: int) -> tuple[torch.Tensor, ...]:
        """Where a pass leaves hidden states, features and tokens: of few rows, where the last pass
        of that size left its own."""
        key = rows, hidden, captured
        if (room := self._passes.get(key)) is None:
            room = torch.empty(rows, hidden), torch.empty(rows, captured * hidden)
            room = *room, torch.empty(rows, dtype=torch.int64)
            if rows <= FEW_ROWS:
                self._passes[key] = room
        return room

    def run(
        self,
        prepared: PreparedLayer | PreparedLayers,
        kv_table: int,
        x: torch.Tensor,
        batch: FlatBatch,
        inputs: torch.Tensor | None,
        outputs: OutputRows | None = None,
        capture: int | None = None,
        count: int = 1,
    ) -> torch.Tensor:
        """``count`` layers, of tensors as the C code wants them."""
        wanted = None if outputs is None else prepare_batch(outputs.batch)
        if self.library.sf_layers(
            self.context_address,
            prepared.table,
            count,
            self.prepared_batch(batch).address,
            kv_table,
            None if inputs is None else inputs.data_ptr(),
            x.data_ptr(),
            None if wanted is None else wanted.address,
            None if outputs is None else outputs.index.data_ptr(),
            capture,
            self.thread_count,
        ):
            raise MemoryError("no memory for a layer's intermediate results")
        return x if outputs is None else x[: len(outputs.index)]

    def move_paths(self, layers: Sequence[NativeKV], paths: AcceptedPaths) -> None:
        """See ``Backend.move_paths``."""
        source, target = key_moves(paths)
        tables = paths.tables[paths.slots]
        for kv in layers:
            move_keys(self.library, kv, self.dtype, tables, source, target)

    def prepared_batch(self, batch: FlatBatch) -> PreparedBatch:
        """The batch as the C code reads it; kept for the next call with the same one."""
        prepared = self._batches.get(id(batch))
        if prepared is None:
            if len(self._batches) >= MOST_PREPARED:
                self._batches.clear()
            self._batches[id(batch)] = prepared = prepare_batch(batch)
        return prepared

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """float32 [N, n] -> [N, n]."""
        x = floats(x)
        out = torch.empty_like(x)
        self.library.sf_norm(
            x.data_ptr(), x.shape[0], x.shape[1], weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def head(
        self, norm: torch.Tensor, eps: float, linear: NativeLinear, x: torch.Tensor
    ) -> torch.Tensor:
        """x [M, hidden] -> float32 logits [M, vocab]."""
        x = floats(x)
        out = torch.empty(x.shape[0], linear.shape[0])
        self._linear(norm.data_ptr(), eps, linear, x, out)
        return out

    def greedy(
        self, norm: torch.Tensor, eps: float, linear: NativeLinear, x: torch.Tensor
    ) -> torch.Tensor:
        """See ``Backend.greedy``; the logits never leave the caches."""
        x = floats(x)
        tokens = torch.empty(x.shape[0], dtype=torch.int64)
        self._linear(norm.data_ptr(), eps, linear, x, None, tokens)
        return tokens

    def linear(self, linear: NativeLinear, x: torch.Tensor) -> torch.Tensor:
        """The packed linear alone: [N, in] -> float32 [N, out]."""
        x = floats(x)
        out = torch.empty(x.shape[0], linear.shape[0])
        self._linear(None, 0.0, linear, x, out)
        return out

    def _linear(
        self,
        norm: int | None,
        eps: float,
        linear: NativeLinear,
        x: torch.Tensor,
        out: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        if x.shape[1] != linear.shape[1]:
            raise ValueError(f"an input of {x.shape[1]} columns for {linear.shape[1]}")
        if self.library.sf_head(
            self.context_address,
            norm,
            eps,
            linear.address,
            x.data_ptr(),
            x.shape[0],
            None if out is None else out.data_ptr(),
            None if tokens is None else tokens.data_ptr(),
            self.thread_count,
        ):
            raise MemoryError("no memory for the input of a linear")

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [M, V] without NaN -> int64 [M]; the lowest index among equals."""
        return sampling.argmax(self.library, logits, self.thread_count)

    def adjust(self, logits: torch.Tensor, adjustments: Adjustments) -> bool:
        """See ``Backend.adjust``; not for logits of a part of the vocabulary."""
        if adjustments.columns is not None:
            return False
        threads = self.thread_count
        sampling.adjust(self.library, self.context_address, logits, adjustments, threads)
        return True

    def mask_tokens(self, logits: torch.Tensor, masks: TokenMasks) -> None:
        """See ``Backend.mask_tokens``."""
        sampling.mask(self.library, logits, masks, self.thread_count)

    def row_logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        width: int,
        spans: ScoredSpans | None = None,
    ) -> torch.Tensor:
        """See ``Backend.row_logprobs``; logits without NaN."""
        threads = self.thread_count
        return sampling.row_logprobs(self.library, logits, tokens, width, threads, spans)

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """See ``Backend.draw``; logits without NaN."""
        threads = self.thread_count
        return sampling.draw(self.library, self.context_address, logits, draws, threads)


def _release(library: ctypes.CDLL, context: ContextStruct) -> None:
    library.sf_release(ctypes.addressof(context))
