"""All mutations."""

from __future__ import annotations

from . import engine, server, speculation

MUTATIONS = (*speculation.MUTATIONS, *engine.MUTATIONS, *server.MUTATIONS)
