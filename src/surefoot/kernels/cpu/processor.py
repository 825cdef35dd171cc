"""What Linux tells of the processor."""

from __future__ import annotations

from pathlib import Path


def processor_lines(*names: str) -> list[str]:
    """The lines of ``/proc/cpuinfo`` that begin with one of ``names``, each once (cores repeat
    them), in its order; none where there is no such file. x86 lists instructions as "flags", Arm as
    "Features"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line for line in lines if line.startswith(names)))
