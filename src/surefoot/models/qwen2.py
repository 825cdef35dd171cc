"""Qwen2 and Qwen2.5 dense models: biases on q, k and v, never elsewhere."""

from surefoot.models.architecture import Architecture, Presence

QWEN2 = Architecture(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM",),
    gguf_names=("qwen2",),
    qkv_bias=Presence.ALWAYS,
    output_bias=Presence.NEVER,
    mlp_bias=Presence.NEVER,
    has_sliding_window=True,
)
