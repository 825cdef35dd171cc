"""How long texts may be, and how many blocks of KV there are for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from surefoot.config import EngineConfig
from surefoot.engine.memory import Allocations, MemoryPlan, plan_memory
from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposer import Needs
from surefoot.speculation.state import SlotState

DEFAULT_KV_BYTES = 1 << 30
_ROPE_BYTES = 12
"""Per position and element of a head: cos and sin of half of them in float32, and what making them
takes."""


def model_length(config: EngineConfig, model: ModelConfig) -> int:
    """Longest text an engine takes, prompt and output together; refused beyond the context, and
    where the rotary tables of so many positions would not fit in half of the host's memory."""
    length = config.max_model_len or model.max_positions
    if length > model.max_positions:
        raise SurefootError(
            "max_model_len", f"{length} is beyond the model's context of {model.max_positions}"
        )
    per_position = _ROPE_BYTES * model.head_dim
    fitting = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // per_position
    if length > fitting:
        raise SurefootError(
            "max_model_len",
            f"rotary tables of {length} positions take {length * per_position / 1e9:.0f} GB here",
            f"set it to {fitting} or less",
        )
    return length


def check_block_size(config: EngineConfig, decoder: Decoder) -> None:
    """Refuse blocks with which sums, and so texts, would be others than with larger ones."""
    size, least = config.block_size, decoder.backend.smallest_block(decoder.shape)
    if least > 1 and (size < least or size & (size - 1)):
        raise SurefootError(
            "block_size",
            f"{size} does not go with this model's kernels",
            f"use a power of two from {least} on",
        )


def size_pool(
    decoder: Decoder,
    config: EngineConfig,
    state: SlotState,
    max_model_len: int,
    needs: Sequence[Needs],
    taken: Allocations,
) -> tuple[int, MemoryPlan | None]:
    """(Blocks in the KV pool, the unused block 0 included; the plan of a GPU's memory, which is
    made unless ``config`` names the blocks). ``needs`` are the proposers', ``taken`` what the
    engine has allocated so far. SurefootError where there is no room for a block."""
    if config.kv_blocks is not None:
        return config.kv_blocks + 1, None
    backend, plan = decoder.backend, None
    per_block = backend.kv_bytes_per_block(config.block_size, decoder.shape)
    per_block *= decoder.config.layers
    per_block += config.block_size * sum(need.kv_bytes_per_token for need in needs)
    memory = config.kv_cache_memory
    if backend.device.type == "cuda":
        plan = plan_memory(decoder, config, state.max_drafts, taken, needs)
        memory = memory or plan.kv
    span = max_model_len + state.max_drafts
    enough = config.max_num_seqs * -(-span // config.block_size) + 1
    blocks = min((memory or DEFAULT_KV_BYTES) // per_block, enough)
    if blocks < 2:
        raise SurefootError("kv_cache_memory", "holds not even one block", "give it more memory")
    if plan is not None:
        tokens = (blocks - 1) * config.block_size
        plan = plan.with_kv(blocks * per_block, tokens, config.max_num_seqs * max_model_len)
    return blocks, plan
