"""guidellm's benchmark, which counts a stream's tokens by ``continuous_usage_stats``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from server_harness import Server

TOKENS = 16


def test_every_request_is_answered_with_as_many_tokens_as_asked_for(
    server: Server, model: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={server.url},model=llama-0",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=20",
        "tokenizer": f"kind=huggingface_auto,model={model}",
        "data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}",
        "output": f"kind=json,path={report}",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = Path(sys.executable).with_name("guidellm")
    subprocess.run([program, "run", *given, "--disable-console"], check=True, timeout=200)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == totals["total"] == 20
    counts = benchmark["metrics"]["output_token_count"]["successful"]
    assert counts["min"] == counts["max"] == TOKENS
