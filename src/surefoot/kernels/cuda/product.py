"""The product of ``product.cu``, for weights and numbers of rows that Triton's blocks, powers of
two, do not fit well (``product_plan``).

NVRTC compiles it at first use (``machine_code``), and the driver launches it: both through NVIDIA's
``cuda.bindings``, which torch's builds for CUDA bring along.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any, NamedTuple

import torch

from surefoot.kernels.cuda.machine_code import checked, compiled, nvrtc_version
from surefoot.kernels.cuda.product_plan import (
    GROUP,
    MOST_MANY_ROWS,
    STEP,
    ProductPlan,
)
from surefoot.kernels.triton.launch import cdiv, hopper, processors
from surefoot.kernels.triton.matmul_plan import filled_shares, share_length

KERNEL = "product_kernel"

logger = logging.getLogger(__name__)


class Kept(NamedTuple):
    """Rows whose products are written beside the largest ones: those whose slot has a ``use`` other
    than 0."""

    products: torch.Tensor
    """fp32 [N, out], contiguous; what is not kept stays as it is."""
    slots: torch.Tensor
    """int64 [N]: whose a row is; below 0 as 0."""
    use: torch.Tensor
    """int64 [slots]."""


@functools.cache
def available(device: torch.device) -> bool:
    """Whether ``product.cu`` runs on ``device``: on Hopper, with ``cuda.bindings`` and NVRTC. That
    these are missing is logged once: Triton's kernels give the same results, later."""
    if not hopper(device):
        return False
    try:
        # Libraries are found at the first call.
        nvrtc_version()
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "rounds of up to %d rows are slower than they could be (%s): pip install cuda-bindings"
            " nvidia-cuda-nvrtc",
            MOST_MANY_ROWS, error,
        )  # fmt: skip
        return False
    return True


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    plan: ProductPlan,
    indices: torch.Tensor | None = None,
    totals: torch.Tensor | None = None,
    kept: Kept | None = None,
) -> None:
    """``x`` [N, in] times ``weight`` [out, in], bf16, contiguous, ``in`` and ``out`` multiples of
    8, into ``y`` [N, out] fp32; if the plan is gated, SiLU(gate) * up of the weight's halves into
    bf16 [N, out / 2]. If it asks for the largest: those of each tile's outputs into ``y`` [N,
    tiles] fp32, which outputs they are into ``indices``, int32, and the sums of the exponentials of
    a tile's outputs less the largest into ``totals``, fp32, like it, and products as ``kept`` says.
    If the inputs have shares: their sums into ``y`` fp32 [shares, N, out]; ValueError if one of
    them is empty."""
    rows, inputs = x.shape
    if filled_shares(inputs, plan.shares) < plan.shares:
        # Its program would wait for nothing, and write what its registers happen to hold.
        raise ValueError(f"{plan.shares} shares of {inputs} inputs: the last one is empty")
    from cuda.bindings import driver

    outputs = weight.shape[0] // 2 if plan.gated else weight.shape[0]
    function = _function(plan, x.device)
    maps = [_tensor_map(x, GROUP * plan.groups), _tensor_map(weight, plan.width)]
    results = [0 if each is None else each.data_ptr() for each in (y, indices, totals)]
    values: list[Any] = [ctypes.c_uint64(place) for place in results]
    also = (0, 0, 0) if kept is None else [each.data_ptr() for each in kept]
    values.append((ctypes.c_uint64 * 3)(*also))
    sizes = rows, outputs, inputs, share_length(inputs, plan.shares)
    values += [ctypes.c_uint32(size) for size in sizes]
    places = [int(each.getPtr()) for each in maps] + [ctypes.addressof(each) for each in values]
    parameters = (ctypes.c_void_p * len(places))(*places)
    config = driver.CUlaunchConfig()
    tiles = cdiv(rows, GROUP * plan.groups) * cdiv(outputs, plan.width) * plan.shares
    config.gridDimX = min(tiles, processors(x.device))
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX, config.sharedMemBytes = plan.threads, plan.shared_bytes
    config.hStream = driver.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    # Programmatic dependent launch, as in ``kernels.triton.pdl``.
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [early], 1
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


@functools.cache
def _function(plan: ProductPlan, device: torch.device) -> Any:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        module = checked(driver.cuModuleLoadData(compiled(plan)))
        function = checked(driver.cuModuleGetFunction(module, KERNEL.encode()))
        largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, largest, plan.shared_bytes))
    return function


def _tensor_map(matrix: torch.Tensor, box_rows: int) -> Any:
    """For copies of ``box_rows`` rows by a step's inputs, swizzled."""
    from cuda.bindings import driver

    rows, inputs = matrix.shape
    wide, word = driver.cuuint64_t, driver.cuuint32_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.data_ptr(),
            [wide(inputs), wide(rows)],
            [wide(2 * inputs)],
            [word(STEP), word(box_rows)],
            [word(1), word(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
