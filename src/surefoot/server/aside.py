"""Work that must not keep the event loop waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

SWITCH_SECONDS = 0.0005
"""After which a thread that runs Python gives way to the event loop (``sys.setswitchinterval``);
CPython's own 5 ms would add up, as the loop has to wait so long whenever it was idle."""
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Aside:
    """Threads beside the event loop. Work on what is large takes turns in one of them: many would
    pass the interpreter's lock to each other."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, "large")

    async def run(
        self,
        large: bool,
        work: Callable[Parameters, Result],
        *args: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """What ``work`` returns or raises; ``large``: whether it is on something large."""
        pool = self._large if large else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, lambda: work(*args, **named))
