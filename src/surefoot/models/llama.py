"""Llama and the models published under its name (SmolLM2, TinyLlama, Llama 3.x)."""

from surefoot.models.architecture import Architecture, Presence

LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_names=("llama",),
    qkv_bias=Presence.CONFIG,
    output_bias=Presence.CONFIG,
    mlp_bias=Presence.CONFIG,
    gguf_permutes_qk=True,
)
