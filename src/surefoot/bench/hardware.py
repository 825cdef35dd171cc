"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from surefoot.kernels.cpu.processor import processor_lines


def describe_hardware(device: str = "cpu") -> dict[str, Any]:
    """CPU name, usable cores, memory, system, and the GPU if ``device`` is one; JSON-ready."""
    import torch

    hardware: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.startswith("cuda"):
        hardware["gpu"] = describe_gpu(device)
    return hardware


def name_hardware(device: str = "cpu") -> str:
    """For captions: the GPU's name if ``device`` is one, otherwise CPU and usable cores."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cores = usable_cores()
    return f"{cpu_name()}, {cores} core{'s' * (cores != 1)}"


def describe_gpu(device: str) -> dict[str, Any]:
    """Name, memory, and the versions that its speed depends on."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    try:
        compiler = version("triton")
    except PackageNotFoundError:
        compiler = None
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": gpu_driver(),
        "cuda": torch.version.cuda,
        "triton": compiler,
    }


def gpu_driver() -> str | None:
    """Version of NVIDIA's kernel driver; None where the system does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def cpu_name() -> str:
    names = [line.partition(":")[2].strip() for line in processor_lines("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def memory_gib() -> float | None:
    """Physical memory; None where the system does not tell."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return round(size / 2**30, 1)
