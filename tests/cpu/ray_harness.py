"""``surefoot serve --replicas`` as users start it, and the processes below it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_harness import Server, running_server

CORE = "surefoot.server.core"
ACTOR = "ray::ServeReplica:surefoot:surefoot"


@contextmanager
def running_replicas(
    model: Path | str, replicas: int, *arguments: str, **options: Any
) -> Iterator[Server]:
    """A server with that many replicas, which is stopped in good order at the end: what it started
    must not outlive it."""
    with running_server(model, "--replicas", str(replicas), *arguments, **options) as server:
        below: set[int] = set()
        try:
            yield server
            below = set(descendants(server.process.pid))
        finally:
            if server.process.poll() is None:
                server.stop()
        assert not [pid for pid in below if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> Iterator[int]:
    """Process ids of all that a process started, and what these did."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for process in found:
        yield from parents.get(process, ())
        found += parents.get(process, ())


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def actors(server: Server) -> dict[int, int]:
    """Of each replica: the process of its actor, and that of its core."""
    found = {}
    for pid in descendants(server.process.pid):
        if command(pid).startswith(ACTOR) and "routing" not in command(pid):
            cores = [
                child for child in descendants(pid) if "surefoot.server.core" in command(child)
            ]
            if len(cores) == 1:
                found[pid] = cores[0]
    return found


def busiest(server: Server) -> tuple[int, int]:
    """The processes (actor, core) of the replica whose core computes most for a moment."""
    found, ticks = actors(server), core_ticks(server)
    return max(found.items(), key=lambda pair: ticks.get(pair[1], 0))


def core_ticks(server: Server) -> dict[int, int]:
    """What each core computes within 0.3 s."""
    before = {core: processor_time(core) for core in actors(server).values()}
    time.sleep(0.3)
    return {core: processor_time(core) - ticks for core, ticks in before.items()}


def processor_time(pid: int) -> int:
    """Of a process, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def requests_by_replica(server: Server) -> dict[str, float]:
    """Texts that ended, by replica, once the replicas have told each other."""
    counts: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("surefoot_requests_finished_total{"):
            replica = line.split('replica="')[1].split('"')[0]
            counts[replica] = counts.get(replica, 0) + float(line.split()[-1])
    return counts


def wait_for_replicas(server: Server, count: int, seconds: float = 120.0) -> None:
    """Until so many replicas are listed in the metrics, and have nothing left to prepare."""
    end = time.monotonic() + seconds
    while (
        len(requests_by_replica(server)) != count
        or len(actors(server)) != count
        or max(core_ticks(server).values()) > 2
    ):
        assert time.monotonic() < end, "the replicas do not come"
        time.sleep(0.3)
