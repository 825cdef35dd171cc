"""What kernels in Gluon for Hopper's warpgroups have in common."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
