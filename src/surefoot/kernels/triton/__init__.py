"""Triton kernels for NVIDIA GPUs. Each is held to its torch twin, on a GPU or by the interpreter
(``TRITON_INTERPRET=1``, CPU tensors).

None of them waits for the host. Grids come from bounds that the host knows (rows, spans, splits);
lengths, counts and positions are read from device memory, so a captured CUDA graph may be replayed
with other values. Import these modules only where the backend has been chosen: they need triton.
"""

import os

from surefoot.cache import own_folder

# Triton reads it when it compiles.
if (_folder := own_folder("triton", "TRITON_CACHE_DIR", "TRITON_HOME")) is not None:
    os.environ["TRITON_CACHE_DIR"] = str(_folder)
