"""The checks that tests/cpu run in Triton's interpreter, compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

# The others build engines: test_engine_cuda.
from test_books import (  # noqa: F401
    test_a_proposer_that_sleeps_learns_from_its_last_offer,
    test_a_round_commits_the_same,
    test_they_learn_and_choose_the_same,
    test_what_all_requests_teach_does_not_depend_on_their_order,
)
from test_triton_control import (  # noqa: F401
    test_rows_go_to_prompts_and_to_the_most_likely_drafts,
    test_what_a_grammar_cuts_is_neither_on_offer_nor_in_view,
)
from test_triton_drafting import *  # noqa: F403
from test_triton_growth import *  # noqa: F403
from test_triton_kernels import *  # noqa: F403
from test_triton_products import *  # noqa: F403
from test_triton_prompts import *  # noqa: F403
from test_triton_sampling import *  # noqa: F403
from test_triton_slots import *  # noqa: F403
from test_triton_tree_rounds import *  # noqa: F403
from test_triton_trees import *  # noqa: F403

pytestmark = pytest.mark.gpu
