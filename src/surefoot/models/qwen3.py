"""Qwen3 dense models: RMSNorm over each head of q and k, biases only where the config says."""

from surefoot.models.architecture import Architecture, Presence

QWEN3 = Architecture(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    gguf_names=("qwen3",),
    qkv_bias=Presence.CONFIG,
    output_bias=Presence.CONFIG,
    mlp_bias=Presence.NEVER,
    qk_norm=True,
    has_sliding_window=True,
    default_head_dim=128,
)
