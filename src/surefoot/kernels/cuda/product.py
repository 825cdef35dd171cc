"""The product of ``product.cu``, for weights and numbers of rows that Triton's blocks, powers of
two, do not fit well (``product_plan``).

NVRTC compiles it at first use, in 0.1 to 0.5 s for a plan, and the driver launches it: both through
NVIDIA's ``cuda.bindings``, which torch's builds for CUDA bring along.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch

from surefoot.kernels.cuda.product_plan import (
    GROUP,
    MOST_MANY_ROWS,
    STEP,
    ProductPlan,
)
from surefoot.kernels.triton.launch import cdiv, hopper, processors
from surefoot.kernels.triton.matmul_plan import share_length

KERNEL = "product_kernel"
SOURCE = Path(__file__).parent / "product.cu"
MULTIPLY = """
// Add a step of 16 inputs to the sums, or begin them with it.
__device__ __forceinline__ void multiply(float (&sums)[{count}], u64 x, u64 weight, bool add) {{
    asm volatile(
        "{{\\n"
        ".reg .pred add;\\n"
        "setp.ne.b32 add, %{flag}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.bf16.bf16 {{{names}}},"
        " %{x}, %{weight}, add, 1, 1, 0, 0;\\n"
        "}}" : {sums} : "l"(x), "l"(weight), "r"((int)add));
}}

__device__ __forceinline__ void await_products(float (&sums)[{count}]) {{
    asm volatile("wgmma.wait_group.sync.aligned 0;" : {sums} :: "memory");
}}
"""

logger = logging.getLogger(__name__)


@functools.cache
def available(device: torch.device) -> bool:
    """Whether ``product.cu`` runs on ``device``: on Hopper, with ``cuda.bindings`` and NVRTC. That
    these are missing is logged once: Triton's kernels give the same results, later."""
    if not hopper(device):
        return False
    try:
        from cuda.bindings import nvrtc

        # Libraries are found at the first call.
        _checked(nvrtc.nvrtcVersion())
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "rounds of up to %d rows are slower than they could be (%s): pip install cuda-bindings"
            " nvidia-cuda-nvrtc",
            MOST_MANY_ROWS, error,
        )  # fmt: skip
        return False
    return True


def source(plan: ProductPlan) -> str:
    """``product.cu`` for ``plan``."""
    count = plan.tile // 2
    defines = {
        "GROUPS": plan.groups,
        "TILE": plan.tile,
        "STAGES": plan.stages,
        "GATED": int(plan.gated),
        "LARGEST": int(plan.largest),
        "SHARES": plan.shares,
    }
    multiply = MULTIPLY.format(
        count=count,
        x=count,
        weight=count + 1,
        flag=count + 2,
        tile=plan.tile,
        names=", ".join(f"%{index}" for index in range(count)),
        sums=", ".join(f'"+f"(sums[{index}])' for index in range(count)),
    )
    lines = [f"#define {name} {value}" for name, value in defines.items()]
    return "\n".join([*lines, SOURCE.read_text().replace("// MULTIPLY\n", multiply)])


def compile_source(text: str) -> bytes:
    """Machine code for Hopper. RuntimeError with the compiler's messages."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"product.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    plan: ProductPlan,
    indices: torch.Tensor | None = None,
    totals: torch.Tensor | None = None,
) -> None:
    """``x`` [N, in] times ``weight`` [out, in], bf16, contiguous, ``in`` and ``out`` multiples of
    8, into ``y`` [N, out] fp32; if the plan is gated, SiLU(gate) * up of the weight's halves into
    bf16 [N, out / 2]. If it asks for the largest: those of each tile's outputs into ``y`` [N,
    tiles] fp32, which outputs they are into ``indices``, int32, and the sums of the exponentials of
    a tile's outputs less the largest into ``totals``, fp32, like it. If the inputs have shares:
    their sums into ``y`` fp32 [shares, N, out]."""
    from cuda.bindings import driver

    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if plan.gated else weight.shape[0]
    function = _function(plan, x.device)
    maps = [_tensor_map(x, GROUP * plan.groups), _tensor_map(weight, plan.width)]
    results = [0 if each is None else each.data_ptr() for each in (y, indices, totals)]
    values: list[Any] = [ctypes.c_uint64(place) for place in results]
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
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


@functools.cache
def _function(plan: ProductPlan, device: torch.device) -> Any:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(compiled(plan)))
        function = _checked(driver.cuModuleGetFunction(module, KERNEL.encode()))
        largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, largest, plan.shared_bytes))
    return function


@functools.cache
def compiled(plan: ProductPlan) -> bytes:
    """Machine code for ``plan``."""
    return compile_source(source(plan))


def _tensor_map(matrix: torch.Tensor, box_rows: int) -> Any:
    """For copies of ``box_rows`` rows by a step's inputs, swizzled."""
    from cuda.bindings import driver

    rows, inputs = matrix.shape
    wide, word = driver.cuuint64_t, driver.cuuint32_t
    return _checked(
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


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error!r}")
    return values[0] if values else None
