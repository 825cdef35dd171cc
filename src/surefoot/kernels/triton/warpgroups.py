"""What kernels in Gluon for Hopper's warpgroups have in common."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

jit: Any = gluon.jit
ROWS = gl.constexpr(64)
"""Rows of a warpgroup: the fewest that Hopper's matrix instructions take."""


@jit
def await_inputs():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def release_next():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# Newer versions of Triton have other names for these.
if hasattr(tma, "async_load"):
    load_box, store_box = tma.async_load, tma.async_store

    @jit
    def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)

else:
    load_box, store_box = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @jit
    def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
