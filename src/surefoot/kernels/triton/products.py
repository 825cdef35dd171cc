"""Products with a weight: which kernel computes them, cuBLAS where it gives the same bits faster.

A row's product is a function of the row alone, to the bit: its inputs are added up in order, in a
number of shares that depends on the weight's shape and the card (``matmul_plan.shares``), and what
follows is rounded where separate operations would round. Both kernels do so with any plan; cuBLAS
computes only those shapes and numbers of rows for which it was seen to (``cublas``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from surefoot.kernels.cuda.product import Kept, available
from surefoot.kernels.cuda.product import multiply as multiply_by_cuda
from surefoot.kernels.cuda.product_plan import ProductPlan, product_plan, shared_plan
from surefoot.kernels.draws import Maxima
from surefoot.kernels.triton.activation import silu_mul
from surefoot.kernels.triton.argmax import argmax, parts_of, reduce_parts
from surefoot.kernels.triton.cublas import CublasChoices, Key
from surefoot.kernels.triton.large_matmul import multiply_many
from surefoot.kernels.triton.large_plan import LargePlan, large_plan
from surefoot.kernels.triton.launch import hopper, processors, shared_memory
from surefoot.kernels.triton.matmul import add_shares, describable, multiply_few, outputs_of
from surefoot.kernels.triton.matmul_plan import (
    MAX_ROWS,
    MatmulPlan,
    plan_for,
    shares,
)
from surefoot.kernels.triton.norm import add_rms_norm, sum_add_rms_norm

Norm = tuple[torch.Tensor, float]
"""Weight [width] and epsilon of an RMSNorm."""
Plan = MatmulPlan | LargePlan


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
    dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """``x`` [N, in] times ``weight`` [out, in], both bf16 or both fp32, contiguous; ``bias`` [out]
    of any float type -> [N, out] in ``dtype`` (default: x's).

    ``silu``: the weight's halves are gate and up, and the result is SiLU(gate) * up [N, out / 2].
    ``residual`` [N, out] is added after rounding. Sums are fp32. ValueError for more rows than
    ``plan`` is for.
    """
    rows, outputs = x.shape[0], outputs_of(weight, silu)
    plan = plan or plan_of(x, weight, silu, plain=bias is None and dtype in (None, x.dtype))
    y = x.new_empty((rows, outputs), dtype=dtype or x.dtype)
    part = multiply(x, weight, bias, residual, silu, y, plan)
    if part is not None:
        add_shares(part, bias, residual, silu, y)
    return y


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu: bool,
    y: torch.Tensor,
    plan: Plan,
) -> torch.Tensor | None:
    """The product as ``matmul`` says it, into ``y``; or, where ``plan`` has shares computed by
    several programs, their sums without any epilogue, fp32 [split_k, N, out]."""
    if isinstance(plan, LargePlan):
        return multiply_many(x, weight, bias, residual, silu, y, plan)
    return multiply_few(x, weight, bias, residual, silu, y, plan)


def plan_of(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, split_k: int = 0, plain: bool = False
) -> Plan:
    """How to multiply ``x`` [N, in] with ``weight``. ``split_k``: the number of shares for more
    than 128 rows; 0: the shape's own. ``plain``: nothing is added to the product before it is
    rounded to x's dtype."""
    outputs = outputs_of(weight, gated)
    card = x.dtype.itemsize, processors(x.device), shared_memory(x.device)
    if x.shape[0] <= MAX_ROWS:
        return plan_for(x.shape[0], outputs, x.shape[1], gated, *card)
    split_k = split_k or shares(outputs, x.shape[1], gated, *card)
    ahead = plain and split_k > 1 and not gated and x.dtype == torch.bfloat16 and hopper(x.device)
    ahead = ahead and describable(x) and outputs % 8 == 0
    return large_plan(x.shape[0], outputs, x.shape[1], gated, *card, split_k, ahead)


def cuda_takes(x: torch.Tensor) -> bool:
    """Whether ``product.cu`` can multiply ``x`` at all."""
    return x.dtype == torch.bfloat16 and available(x.device) and describable(x)


@dataclass(frozen=True)
class TritonLinear:
    """``weight`` [out, in], ``bias`` [out] or None, in the backend's dtype, and the backend's
    ``choices`` of cuBLAS."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    choices: CublasChoices = field(default_factory=CublasChoices)

    def plan(
        self, x: torch.Tensor, gated: bool = False, split_k: int = 0, plain: bool = True
    ) -> Plan:
        return plan_of(x, self.weight, gated, split_k, plain and self.bias is None)

    def key(self, gated: bool, split_k: int) -> Key:
        """What cuBLAS is chosen by, beside the number of rows."""
        return (*self.weight.shape, self.bias is not None, gated, split_k)

    def product(self, x: torch.Tensor, gated: bool = False, split_k: int = 0) -> torch.Tensor:
        """[N, in] -> [N, out]; ``gated``: SiLU(gate) * up [N, out / 2]. ``split_k`` as ``plan_of``
        has it."""
        if self.choices.takes(self.key(gated, split_k), x, self.weight):
            return self.by_cublas(x, gated)
        return self.by_our_own(x, gated, split_k)

    def by_our_own(self, x: torch.Tensor, gated: bool, split_k: int) -> torch.Tensor:
        """``product`` without cuBLAS."""
        if gated and (found := self.by_cuda(x, gated)) is not None:
            return found
        return self.by_kernel(x, gated, split_k)

    def by_cublas(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        product = linear(x, self.weight, self.bias)
        return silu_mul(product) if gated else product

    def cuda_plan(self, x: torch.Tensor, gated: bool, largest: bool = False) -> ProductPlan | None:
        """How ``product.cu`` multiplies ``x``, if it shall. Nothing is added to its products."""
        if self.bias is not None or not cuda_takes(x):
            return None
        outputs, inputs = outputs_of(self.weight, gated), x.shape[1]
        card = processors(x.device), shared_memory(x.device)
        if shares(outputs, inputs, gated, x.dtype.itemsize, *card) > 1:
            return None
        return product_plan(x.shape[0], outputs, inputs, gated, *card, largest)

    def by_cuda(self, x: torch.Tensor, gated: bool) -> torch.Tensor | None:
        """The product by ``product.cu``, gated in x's dtype or as float32 sums; None if it shall
        not compute it."""
        plan = self.cuda_plan(x, gated)
        if plan is None:
            return None
        dtype = x.dtype if gated else torch.float32
        y = x.new_empty((x.shape[0], outputs_of(self.weight, gated)), dtype=dtype)
        multiply_by_cuda(x, self.weight, y, plan)
        return y

    def shares_by_cuda(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sums of the product's shares by ``product.cu``, without bias, float32 [shares, N,
        out]; None if it shall not compute them."""
        if not cuda_takes(x):
            return None
        outputs, inputs = self.weight.shape
        card = processors(x.device), shared_memory(x.device)
        count = shares(outputs, inputs, False, x.dtype.itemsize, *card)
        plan = shared_plan(x.shape[0], outputs, inputs, count, *card) if count > 1 else None
        if plan is None:
            return None
        sums = torch.empty((count, x.shape[0], outputs), dtype=torch.float32, device=x.device)
        multiply_by_cuda(x, self.weight, sums, plan)
        return sums

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The output of each row's largest sum, the lowest of equals: [N, in] -> int64 [N]."""
        found = self.largest_of_tiles(x)
        if found is None:
            return argmax(self.wide(x))
        return reduce_parts(found[0], found[1], self.weight.shape[0])

    def largest_of_tiles(
        self, x: torch.Tensor, totals: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Each row's largest sum in every tile of outputs (float32), its output (int32) and, if
        asked for ``totals``, the sum of the exponentials of all less the largest (float32), [N,
        tiles] each; None where ``product.cu`` does not compute them."""
        plan = self.cuda_plan(x, False, largest=True)
        return None if plan is None else self.largest_by(plan, x, totals)

    def largest_by(
        self, plan: ProductPlan, x: torch.Tensor, totals: bool = False, kept: Kept | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``largest_of_tiles`` by a plan that asks for them, and products as ``kept`` says."""
        sums, indices = parts_of(x.shape[0], self.weight.shape[0], x.device, plan.width)
        powers = torch.empty_like(sums) if totals else None
        multiply_by_cuda(x, self.weight, sums, plan, indices, powers, kept)
        return sums, indices, powers

    def wide_where_used(
        self, x: torch.Tensor, slots: torch.Tensor, use: torch.Tensor
    ) -> tuple[torch.Tensor, Maxima | None]:
        """``wide`` of the rows of which more than the largest is wanted, and the largest of all;
        ``slots`` and ``use`` as of ``Backend.head_where_used``."""
        plan = self.cuda_plan(x, False, largest=True)
        if plan is None:
            return self.wide(x), None
        products = x.new_empty((x.shape[0], self.weight.shape[0]), dtype=torch.float32)
        sums, indices, _ = self.largest_by(plan, x, kept=Kept(products, slots, use))
        return products, Maxima(sums, indices)

    def by_kernel(self, x: torch.Tensor, gated: bool, split_k: int) -> torch.Tensor:
        plan = self.plan(x, gated, split_k)
        return matmul(x, self.weight, self.bias, silu=gated, plan=plan)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self.product(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up: [N, in] -> [N, out / 2]."""
        return self.product(x, gated=True)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus ``residual`` [N, out]."""
        if self.choices.takes(self.key(False, 0), x, self.weight):
            return self.by_cublas(x, False).add_(residual)
        return matmul(x, self.weight, self.bias, residual, plan=self.plan(x))

    def added_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``added`` and its RMSNorm, [N, out] each. ``kept``: a second place for the former, whose
        rows may be strided."""
        if self.choices.takes(self.key(False, 0), x, self.weight):
            return add_rms_norm(self.by_cublas(x, False), residual, *norm, kept)
        part = self.shares_by_cuda(x)
        if part is not None:
            return sum_add_rms_norm(part, self.bias, residual, *norm, kept)
        y = torch.empty_like(residual)
        part = multiply(x, self.weight, self.bias, None, False, y, self.plan(x))
        if part is None:
            return add_rms_norm(y, residual, *norm, kept)
        return sum_add_rms_norm(part, self.bias, residual, *norm, kept)

    def wide(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """The product as float32, not rounded to the backend's dtype on the way, plus ``added``,
        float32 [N, out], contiguous."""
        if added is None and (found := self.by_cuda(x, False)) is not None:
            return found
        plan = self.plan(x, plain=False)
        return matmul(x, self.weight, self.bias, added, dtype=torch.float32, plan=plan)
