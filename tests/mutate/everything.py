"""All mutations."""

from __future__ import annotations

from . import dflash, engine, server, speculation, training

MUTATIONS = (
    *speculation.MUTATIONS,
    *dflash.MUTATIONS,
    *training.MUTATIONS,
    *engine.MUTATIONS,
    *server.MUTATIONS,
)
