"""Triton's interpreter, mended for the tests: import this before any kernel.

The mends hold for Triton 3.6 to 3.9, whichever torch brings: with numpy 2.4 the scalars of 3.6 are
no loop bounds, bf16 is truncated where a GPU rounds to even, ``tl.dot`` multiplies the bits of bf16
numbers, and a comparison of scalars becomes a block of integers, which 3.9 refuses as a mask. And
numpy's products of floats sum in an order that depends on the matrices' sizes, on some processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

Builder: Any = interpreter.InterpreterBuilder
Handle: Any = interpreter.TensorHandle
patch_tensor: Any = interpreter._patch_lang_tensor
launch: Any = interpreter.GridExecutor.__call__
make_dot, make_splat = Builder.create_dot, Builder.create_splat
convert: Any = interpreter._convert_float


def _to_float(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32)


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source == tl.bfloat16 and target == tl.float32:
        return _to_float(data)
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
        return rounded.view(torch.uint16).numpy()
    return convert(data, source, target, rounding)


def _dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    wide = [
        Handle(_to_float(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
        for x in (a, b)
    ]
    if d.dtype.scalar != tl.float32:
        return make_dot(self, *wide, d, *rest)
    # Products of floats are exact in double precision, where the order of a sum hardly shows.
    product = np.matmul(*(x.data.astype(np.float64) for x in wide)).astype(np.float32)
    return Handle(product + d.data, d.dtype.scalar)


def _splat(self: Any, block_type: Any, scalar: Any) -> Any:
    block = make_splat(self, block_type, scalar)
    return Handle(block.data.astype(scalar.data.dtype), block.dtype)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


patched_modules: set[str] = set()


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Patching the language takes milliseconds: once a launch and module, not once a call.
    if self.fn.__module__ not in patched_modules:
        interpreter._patch_lang(self.fn)
        patched_modules.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> None:
    patched_modules.clear()
    launch(self, *args, **kwargs)


interpreter._convert_float = _convert
interpreter._patch_lang_tensor = _patch_tensor
Builder.create_dot = _dot
Builder.create_splat = _splat
interpreter.InterpretedFunction.__call__ = _call_device_function
interpreter.GridExecutor.__call__ = _launch
