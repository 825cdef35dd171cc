"""The metrics of all replicas on one page, each sample with its replica's name."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from prometheus_client.core import Metric
from ray import serve

from surefoot.server.exposition import Exposition, by_replica, page_of

PUSH_SECONDS = 5.0
"""How old another replica's numbers on a page may be."""
SILENT_SECONDS = 3 * PUSH_SECONDS
"""After which a replica that says nothing is taken to be gone."""
BOARD = "metrics"
"""The deployment actor's name."""

logger = logging.getLogger(__name__)


class Board:
    """What each replica said last. A deployment actor: Ray Serve keeps one of it for the replicas
    of a deployment."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[float, list[Metric]]] = {}

    def push(self, replica: str, families: list[Metric]) -> None:
        self._pages[replica] = time.monotonic(), families

    def exchange(self, replica: str, families: list[Metric]) -> dict[str, list[Metric]]:
        """``push``, and then ``pages``: what one page shows, the next one of any replica has, too,
        so that no counter ever goes back."""
        self.push(replica, families)
        return self.pages()

    def remove(self, replica: str) -> None:
        """A replica ends in good order."""
        self._pages.pop(replica, None)

    def pages(self) -> dict[str, list[Metric]]:
        """By replica, without those that have been silent for too long."""
        oldest = time.monotonic() - SILENT_SECONDS
        self._pages = {name: page for name, page in self._pages.items() if page[0] >= oldest}
        return {name: families for name, (_, families) in self._pages.items()}


class SharedExposition(Exposition):
    """A replica's own metrics as they are now, and the others' as they were a few seconds ago."""

    def __init__(self, own: Exposition, replica: str) -> None:
        self._own = own
        self._replica = replica

    def families(self) -> list[Metric]:
        return self._own.families()

    async def page(self) -> bytes:
        """All replicas' metrics; this one's alone while the board cannot be reached."""
        own = self.families()
        pages = {self._replica: own}
        try:
            pages = await _board().exchange.remote(self._replica, own)
        except Exception as error:
            logger.warning("the other replicas' metrics are not at hand: %s", error)
        return page_of(by_replica(pages))

    async def push_forever(self) -> None:
        """Tell the board, until cancelled; then have it forget this replica."""
        try:
            while True:
                try:
                    await _board().push.remote(self._replica, self.families())
                except Exception as error:
                    # Ray starts the board anew; its handle has to be asked for again, too.
                    logger.warning("metrics could not be shared: %s", error)
                await asyncio.sleep(PUSH_SECONDS)
        finally:
            _board().remove.remote(self._replica)


def _board() -> Any:
    return serve.get_deployment_actor(BOARD)
