"""All mutations."""

from __future__ import annotations

from . import dflash, engine, server, speculation

MUTATIONS = (*speculation.MUTATIONS, *dflash.MUTATIONS, *engine.MUTATIONS, *server.MUTATIONS)
