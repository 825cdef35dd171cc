"""A norm's sum of squares has one order, whatever comes before the norm and however many rows.

Which thread adds what is the compiler's choice. Here it compiles for a GPU, which needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from surefoot.kernels.triton import norm

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from surefoot.kernels.triton.norm import rms_norm_kernel

def layouts(shares, add, strided, keep, dtype, block, warps):
    names = [parameter.name for parameter in rms_norm_kernel.params]
    wide = "*fp32" if shares else f"*{dtype}"
    types = {"x_ptr": wide, "weight_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    types |= {"width": "i32", "eps": "fp32"}
    values = {"ADD": add, "BLOCK": block, "SHARES": shares, "BIAS": False, "PDL": True}
    values |= {"bias_ptr": None, "KEEP": keep}
    types |= {"outer_stride": "i32", "kept_stride": "i32"}
    if strided:
        types |= {"inner": "i32"}
    else:
        values |= {"inner": 1}
    if keep:
        types |= {"kept_ptr": f"*{dtype}"}
    else:
        values |= {"kept_ptr": None}
    if add:
        types |= {"residual_ptr": f"*{dtype}", "sum_ptr": f"*{dtype}"}
    else:
        values |= {"residual_ptr": None, "sum_ptr": None}
    places = {name: (names.index(name),) for name in names}
    divisible = [name for name in types if name not in ("eps", "inner")]
    source = ASTSource(
        rms_norm_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {places[name]: value for name, value in values.items()},
        {places[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    text = triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ttgir"]
    meant = dict(re.findall(r"^(#\\w+) = (.*)$", text, re.M))
    return [meant[name] for name in re.findall(r"\\}\\) : \\(tensor<[^#]*(#\\w+)>\\) ->", text)]

print(json.dumps([layouts(*job) for job in json.loads(sys.argv[1])]))
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_all_norms_of_a_width_add_in_one_order(dtype: str) -> None:
    """Alone, of rows of larger blocks, after an addition, after a product in three or six shares,
    and with the sum kept in a second place."""
    variants = [(0, False, False, False), (0, False, True, False), (0, True, False, False)]
    variants += [(shares, True, False, keep) for shares in (3, 6) for keep in (False, True)]
    block, warps = 4096, 16
    jobs = [(*variant, dtype, block, warps) for variant in variants]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", COMPILE, json.dumps(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert [len(layouts) for layouts in found] == [1] * len(jobs), "one sum in each"
    assert len({layouts[0] for layouts in found}) == 1, found


def test_norms_are_launched_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append((args[13], options))

    monkeypatch.setattr(norm, "rms_norm_kernel", Kernel())
    weight = torch.ones(2560)
    for rows in (1, 128, 129, 2048):
        x, parts = torch.empty(rows, 2560), torch.empty(3, rows, 2560)
        norm.rms_norm(x, weight, 1e-6)
        norm.add_rms_norm(x, x, weight, 1e-6)
        norm.sum_add_rms_norm(parts, None, x, weight, 1e-6)
        norm.sum_add_rms_norm(parts, None, x, weight, 1e-6, torch.empty(rows, 2 * 2560)[:, :2560])
        norm.rms_norm(torch.empty(rows, 3, 2560)[:, 1:], weight, 1e-6)
    assert all(launch == launches[0] for launch in launches)
    assert launches[0][0] == 4096 and launches[0][1]["enable_fp_fusion"] is False
