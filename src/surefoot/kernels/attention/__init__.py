"""Span attention over a paged KV cache (the contract is ``FlatBatch``)."""
