"""Triton's interpreter, mended for the tests: import this before any kernel.

The mends hold for Triton 3.6 to 3.9, whichever torch brings: with numpy 2.4 the scalars of 3.6 are
no loop bounds, bf16 is truncated where a GPU rounds to even, ``tl.dot`` multiplies the bits of bf16
numbers, and a comparison of scalars becomes a block of integers, which 3.9 refuses as a mask. And
numpy's products of floats sum in an order that depends on the matrices' sizes, on some processors.
What it works out again for each of millions of tensors, from their types alone, is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

Builder: Any = interpreter.InterpreterBuilder
Handle: Any = interpreter.TensorHandle
patch_tensor: Any = interpreter._patch_lang_tensor
launch: Any = interpreter.GridExecutor.__call__
make_dot, make_splat = Builder.create_dot, Builder.create_splat
convert: Any = interpreter._convert_float
find_dtype: Any = interpreter._get_np_dtype
make_tensor: Any = tl.tensor.__init__
change_element: Any = tl.block_type.with_element_ty
broadcast: Any = TritonSemantic.broadcast_impl_value


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


numpy_types: dict[str, np.dtype] = {}
# Of tensors, by the names of their types: shapes and whatever else follows from these.
attributes: dict[str, dict[str, Any]] = {}
block_types: dict[tuple[str, str], Any] = {}


def _get_np_dtype(of: Any) -> np.dtype:
    name = of.scalar.name
    if name not in numpy_types:
        numpy_types[name] = find_dtype(of)
    return numpy_types[name]


def _make_tensor(self: Any, handle: Any, of: Any) -> None:
    known = attributes.get(of.name)
    if known is None:
        make_tensor(self, handle, of)
        own = ("handle", "type")
        attributes[of.name] = {name: it for name, it in vars(self).items() if name not in own}
    else:
        vars(self).update(known, handle=handle, type=of)


def _with_element_ty(self: Any, scalar: Any) -> Any:
    key = self.name, scalar.name
    if key not in block_types:
        block_types[key] = change_element(self, scalar)
    return block_types[key]


def _broadcast(self: Any, left: Any, right: Any) -> Any:
    return (left, right) if left.type.name == right.type.name else broadcast(self, left, right)


interpreter._convert_float = _convert
interpreter._get_np_dtype = _get_np_dtype
interpreter._patch_lang_tensor = _patch_tensor
Builder.create_dot = _dot
Builder.create_splat = _splat
interpreter.InterpretedFunction.__call__ = _call_device_function
interpreter.GridExecutor.__call__ = _launch
# What follows is the compiler's, too.
if not ON_GPU:
    tl.tensor.__init__ = _make_tensor
    tl.block_type.with_element_ty = _with_element_ty
    TritonSemantic.broadcast_impl_value = _broadcast
    # The interpreter's types are the language's.
    tl.block_type.to_ir = lambda self, builder: self
