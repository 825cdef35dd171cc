"""What has to be set before anything is imported: Triton's interpreter where there is no GPU, and
as many threads to a worker of pytest-xdist, and to whatever it starts, as it has cores of its own:
kernels whose threads wait for each other take several times as long where they have to take
turns."""

from __future__ import annotations

import os

import torch

from surefoot.bench.hardware import usable_cores

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    threads = max(1, usable_cores() // workers)
    # torch has read it by now, and child processes have not.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
