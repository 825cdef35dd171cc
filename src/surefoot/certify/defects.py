"""Every known defect, in the order in which the self-test puts them in."""

from __future__ import annotations

from surefoot.certify import sabotage, subtle_rounds, subtle_sampling

DEFECTS = (*sabotage.FIRST, *subtle_sampling.DEFECTS, *subtle_rounds.DEFECTS)
