"""Machine code of ``product.cu``: compiled by NVRTC, in 0.1 to 0.5 s for a plan, and kept in
Surefoot's cache folder, under names made of the sources and NVRTC's version.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cache import USE_ANOTHER, cache_root, read_checked, write_checked

if TYPE_CHECKING:
    from surefoot.kernels.cuda.product_plan import ProductPlan

OPTIONS = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
FOLDER = "cuda"
"""Of the cache folder."""
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
def compiled(plan: ProductPlan) -> bytes:
    """Machine code for ``plan``: from the cache folder, if it is there."""
    text = source(plan)
    path = cache_root() / FOLDER / kept_name(text, nvrtc_version())
    code = read_checked(path)
    if code is not None:
        return code
    code = compile_source(text)
    try:
        write_checked(path, code)
    except OSError as error:
        _warn_of(path.parent, error.strerror or str(error))
    return code


def kept_name(text: str, version: tuple[int, int]) -> str:
    """The file of machine code that NVRTC of this ``version`` made of ``text``; begins with what
    all plans of these sources have in common."""
    made_by = f"{text}\0{version}\0{OPTIONS}".encode()
    return f"{current_sources()}-{hashlib.sha256(made_by).hexdigest()[:24]}.cubin"


@functools.cache
def current_sources() -> str:
    """What files of machine code begin with."""
    return hashlib.sha256((MULTIPLY + SOURCE.read_text()).encode()).hexdigest()[:16]


def nvrtc_version() -> tuple[int, int]:
    """RuntimeError or ImportError where it cannot be loaded."""
    from cuda.bindings import nvrtc

    error, *numbers = nvrtc.nvrtcVersion()
    checked((error,))
    return numbers[0], numbers[1]


@functools.cache
def _warn_of(folder: Path, why: str) -> None:
    """Once, not for every plan."""
    logger.warning(
        "the compiled kernels cannot be kept in %s (%s), so every start compiles them anew; %s",
        folder, why, USE_ANOTHER,
    )  # fmt: skip


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

    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"product.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), OPTIONS)
    if int(error) != 0:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def checked(result: tuple[Any, ...]) -> Any:
    """What a function of ``cuda.bindings`` returned beside its error. RuntimeError for one."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error!r}")
    return values[0] if values else None
