"""The checks that tests/cpu run in Triton's interpreter, compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

# The other one builds engines: test_engine_cuda.
from test_triton_control import test_rows_go_to_prompts_and_to_the_most_likely_drafts  # noqa: F401
from test_triton_drafting import *  # noqa: F403
from test_triton_kernels import *  # noqa: F403
from test_triton_prompts import *  # noqa: F403
from test_triton_sampling import *  # noqa: F403
from test_triton_slots import *  # noqa: F403
from test_triton_tree_rounds import *  # noqa: F403

pytestmark = pytest.mark.gpu
