"""EAGLE-3 (Li et al., 2025): training-time test."""
