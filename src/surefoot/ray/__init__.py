"""Many engines under Ray Serve: ``surefoot serve --replicas``, and ``surefoot.ray:build_app`` for
``serve run`` and Serve's configuration files (docs/scale.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from ray.serve import Application

NEEDED = "pip install 'surefoot[ray]'"


def build_app(args: dict[str, Any]) -> Application:
    """A Serve application: replicas of an engine with Surefoot's HTTP surface, and prefix-aware
    routing between them.

    ``args`` has the fields of ``EngineConfig`` and those of ``ServerConfig`` that are not about a
    listening socket, and ``num_replicas`` (a number, or ``auto``), ``autoscaling_config`` and
    ``ray_actor_options`` as Serve's deployments have them. Numbers may be texts, as in ``serve run
    surefoot.ray:build_app model=smollm2-135m num_replicas=2``. Raises SurefootError.
    """
    return _application().build(args)


def require() -> None:
    """Raises SurefootError where Ray Serve, or the server's packages, are not installed."""
    _application()


def _application() -> Any:
    try:
        from surefoot.ray import application
    except ImportError as error:
        missing = f"needs {error.name}, which is not installed"
        raise SurefootError("replicas", missing, NEEDED) from None
    return application


__all__ = ["build_app", "require"]
