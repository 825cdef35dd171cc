"""What one round of the target costs on an NVIDIA GPU, part by part, at a model's shapes.

``python -m surefoot.bench.kernels_cuda [--out FILE]`` builds Qwen3-4B's and SmolLM2-135M's shapes
with random weights and times graph replays: memory bandwidth, all matrix products against cuBLAS,
span attention, attention over prompts beside cuDNN's, and whole steps by number of requests.
``tests/gpu`` hold the kernels to torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from surefoot.bench.cuda_shapes import BLOCK, QWEN3_4B, SMOLLM2, make_batch, seconds
from surefoot.kernels.backend import AttentionShape
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights

QWEN3_CASES = (
    *((requests, 1) for requests in (1, 4, 8, 16, 32, 64, 128)),
    *((1, 2), (1, 4), (1, 5), (1, 8), (1, 16), (8, 5), (32, 4), (32, 5), (128, 5)),
)
SMOLLM2_CASES = ((1, 1), (1, 5), (32, 1), (32, 5), (128, 1), (512, 1))


def bandwidth(size: int = 4 << 30) -> dict[str, float]:
    """TB/s of a copy (read + written) and of a read-only sum, over ``size`` bytes."""
    data = torch.empty(size // 4 * 2, dtype=torch.bfloat16, device="cuda").normal_()
    other = torch.empty_like(data)
    words = data.view(torch.int32)
    return {
        "copy_tb_s": 2 * data.nbytes / seconds(lambda: other.copy_(data)) / 1e12,
        "read_tb_s": data.nbytes / seconds(lambda: words.max()) / 1e12,
    }


def products(decoder: Decoder, rows: int) -> dict[str, float]:
    """Milliseconds of all matrix products of a step, with the additions and norms that our
    kernels fuse with them; cuBLAS without."""
    config = decoder.config
    sizes = {"qkv": config.hidden_size, "o": config.heads * config.head_dim}
    sizes |= {"gate_up": config.hidden_size, "down": config.intermediate_size}
    inputs = {
        name: torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        for name, size in sizes.items()
    }
    residual = torch.randn(rows, config.hidden_size, device="cuda", dtype=torch.bfloat16)

    def ours() -> None:
        for layer in decoder.layers:
            layer.qkv(inputs["qkv"])
            layer.o.added_normed(inputs["o"], residual, (layer.post_norm, layer.eps))
            layer.gate_up.gated(inputs["gate_up"])
            layer.down.added_normed(inputs["down"], residual, (layer.input_norm, layer.eps))
        decoder.head_linear.wide(inputs["qkv"])

    def cublas() -> None:
        for layer in decoder.layers:
            for name in sizes:
                torch.mm(inputs[name], getattr(layer, name).weight.T)
        torch.mm(inputs["qkv"], decoder.head_linear.weight.T)

    def part(name: str) -> Callable[[], None]:
        def run() -> None:
            for layer in decoder.layers:
                linear = getattr(layer, name)
                if name == "gate_up":
                    linear.gated(inputs[name])
                elif name in ("o", "down"):
                    linear.added_normed(inputs[name], residual, (layer.post_norm, layer.eps))
                else:
                    linear(inputs[name])

        return run

    out = {"ours": 1e3 * seconds(ours), "cublas": 1e3 * seconds(cublas)}
    out |= {name: 1e3 * seconds(part(name)) for name in sizes}
    out["head"] = 1e3 * seconds(lambda: decoder.head_linear.wide(inputs["qkv"]))
    return out


def attention(context: int = 1024) -> list[dict[str, float]]:
    """Microseconds of span attention alone, L2 flushed by rotating over several caches."""
    from surefoot.kernels.triton.attention import span_attention

    shape, results = AttentionShape(32, 8, 128, 128**-0.5), []
    for requests in (1, 16, 64):
        blocks = requests * (context // BLOCK + 2) + 1
        caches = [
            torch.randn(2, blocks, 8, BLOCK, 128, device="cuda", dtype=torch.bfloat16)
            for _ in range(8)
        ]
        for rows in (1, 5, 16):
            batch = make_batch(requests, rows, context - rows, 1000)
            q = torch.randn(requests * rows, 32, 128, device="cuda", dtype=torch.bfloat16)

            def run(q=q, batch=batch, caches=caches) -> None:
                for kv in caches:
                    span_attention(q, kv, batch, shape)

            results.append(
                {"requests": requests, "rows": rows, "us": 1e6 * seconds(run) / len(caches)}
            )
    return results


def prompts() -> list[dict[str, Any]]:
    """Microseconds and TFLOP/s of attention over prompts, or parts of them that see ``context``
    earlier keys; beside it, where there are none, torch's with cuDNN, which reads no pages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from surefoot.kernels.triton.launch import hopper
    from surefoot.kernels.triton.prompt_attention import list_tiles, prompt_attention

    shape, results = AttentionShape(32, 8, 128, 128**-0.5), []
    if not hopper(torch.device("cuda", torch.cuda.current_device())):
        return results
    for requests, rows, context in (
        *((1, 8192, 0), (1, 16384, 0), (1, 2048, 0), (8, 2048, 0), (32, 512, 0)),
        *((1, 2048, 6144), (1, 512, 7680)),
    ):
        keys = context + rows
        batch = make_batch(requests, rows, context, 1000, keys)
        size = (2, requests * (keys // BLOCK) + 1, 8, BLOCK, 128)
        layers = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        q = torch.randn(requests * rows, 32, 128, device="cuda", dtype=torch.bfloat16)
        tiles = list_tiles(batch, shape)

        def ours(q=q, batch=batch, tiles=tiles, layers=layers) -> None:
            for kv in layers:
                prompt_attention(q, kv, batch, shape, tiles)

        flops = 4 * 32 * 128 * requests * rows * (context + (rows + 1) / 2)
        runs: dict[str, Callable[[], None]] = {"": ours}
        if not context:
            sizes = [(requests, heads, rows, 128) for heads in (32, 8, 8)]
            dense = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]

            def cudnn(dense=dense) -> None:
                with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                    for _ in range(4):
                        sdpa(*dense, is_causal=True, enable_gqa=True)

            runs["cudnn_"] = cudnn
        result: dict[str, Any] = {"requests": requests, "rows": rows, "context": context}
        for name, run in runs.items():
            time = seconds(run) / 4
            result |= {f"{name}us": 1e6 * time, f"{name}tflop_s": flops / time / 1e12}
        results.append(result)
    return results


def steps(
    decoder: Decoder, cases: Sequence[tuple[int, int]], context: int = 640
) -> list[dict[str, float]]:
    """Milliseconds of forward, head and argmax, captured, by requests and rows per request."""
    results = []
    for requests, rows in cases:
        batch = make_batch(requests, rows, context, decoder.config.vocab_size)
        blocks = requests * (-(-(context + rows) // BLOCK)) + 1
        kv = decoder.backend.allocate_kv(decoder.config.layers, blocks, BLOCK, decoder.shape)
        for pool in kv:
            pool.normal_()

        def run(batch=batch, kv=kv) -> torch.Tensor:
            return decoder.greedy(decoder.forward(batch, kv).hidden)

        ms = 1e3 * seconds(run)
        results.append({"requests": requests, "rows": rows, "ms": ms, "tok_s": requests / ms * 1e3})
        print(results[-1], flush=True)
        del kv
    return results


def main() -> None:
    from surefoot.kernels.triton.backend import TritonBackend

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}

    def report(name: str, value: Any) -> None:
        result[name] = value
        print(name, json.dumps(value), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1))

    report("bandwidth", bandwidth())
    report("attention", attention())
    report("prompts", prompts())
    config = ModelConfig(**SMOLLM2)
    decoder = Decoder(
        config, DummyWeights(config, torch.device("cuda"), torch.bfloat16), TritonBackend()
    )
    report("smollm2 steps", steps(decoder, SMOLLM2_CASES))
    config = ModelConfig(**QWEN3_4B)
    decoder = Decoder(
        config, DummyWeights(config, torch.device("cuda"), torch.bfloat16), TritonBackend()
    )
    report("steps", steps(decoder, QWEN3_CASES))
    report("products", {rows: products(decoder, rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128)})


if __name__ == "__main__":
    main()
