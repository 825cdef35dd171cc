"""The Serve application, from options to deployments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import ray
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.ray.replica import Replica
from surefoot.ray.routing import PrefixRouter, RouteEndpoint
from surefoot.ray.scrape import BOARD, Board
from surefoot.server.serve import ServerConfig

DEPLOYMENT = "surefoot"
ROUTING = "surefoot-routing"
PROXY_VARIABLES = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY")
"""What has to be 1 wherever Ray is started: HAProxy in front of the replicas, which asks for a
replica by the request's body."""
API_KEY = "SUREFOOT_API_KEY"
SERVES_ITSELF = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile")
"""Of ``ServerConfig``: Serve listens, not we."""
SCALE = ("num_replicas", "autoscaling_config", "ray_actor_options")
UNBOUNDED = 1 << 16
"""Requests that Serve lets through to a replica at once: ``max_queue`` is what refuses."""
FULL_SHARE = 0.75
"""Of a batch, that autoscaling aims for."""
HEALTH_SECONDS = 2.0
HEALTH_PATIENCE_SECONDS = 30.0

Settings = TypeVar("Settings", EngineConfig, ServerConfig)


def build(args: Mapping[str, Any]) -> serve.Application:
    """See ``surefoot.ray.build_app``."""
    engine_names = {item.name for item in fields(EngineConfig)}
    server_names = {item.name for item in fields(ServerConfig)} - set(SERVES_ITSELF)
    for name in args:
        if name in SERVES_ITSELF:
            fix = "set it in Serve's http_options, or on what stands in front of the cluster"
            raise SurefootError(name, "is Ray Serve's business, which listens", fix)
        if name not in engine_names | server_names | set(SCALE):
            known = ", ".join(sorted(engine_names | server_names) + list(SCALE))
            raise SurefootError(name, "is no option of build_app", f"known: {known}")
    server = {name: value for name, value in args.items() if name in server_names}
    if API_KEY in os.environ and "api_keys" not in server:
        server["api_keys"] = tuple(os.environ[API_KEY].split())
        if not server["api_keys"]:
            raise SurefootError("api_key", f"{API_KEY} is empty", "unset it to serve without a key")
    replicas = args.get("num_replicas", 1)
    if isinstance(replicas, str) and replicas.isdigit():
        replicas = int(replicas)
    engine = {name: value for name, value in args.items() if name in engine_names}
    return application(
        _read(EngineConfig, engine),
        _read(ServerConfig, server),
        replicas,
        autoscaling_config=args.get("autoscaling_config"),
        ray_actor_options=args.get("ray_actor_options"),
    )


def _read(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """A configuration from values that may be texts."""
    types, read = get_type_hints(kind), {}
    for name, value in values.items():
        try:
            read[name] = TypeAdapter(types[name]).validate_python(value)
        except ValidationError as error:
            raise SurefootError(name, error.errors()[0]["msg"]) from None
    return kind(**read)


def application(
    engine: EngineConfig,
    server: ServerConfig,
    num_replicas: int | str = 1,
    *,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    replica: type[Replica] = Replica,
) -> serve.Application:
    """Deployments of ``replica``, which Serve scales between the bounds of ``autoscaling_config``
    by requests under way, or keeps at ``num_replicas``. Raises SurefootError."""
    for name in PROXY_VARIABLES:
        if os.environ.get(name) != "1":
            problem = "needs Ray Serve's HAProxy, which reads requests before it chooses a replica"
            raise SurefootError("replicas", problem, f"set {name}=1 wherever Ray is started")
    if engine.device.startswith("cuda:"):
        raise SurefootError("device", "is chosen by Ray", "use cuda; Ray gives each replica a GPU")
    deployment = serve.deployment(
        serve.ingress()(replica),  # type: ignore[arg-type]
        name=DEPLOYMENT,
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_PATIENCE_SECONDS,
        ray_actor_options=_resources(engine, ray_actor_options),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter  # pyright: ignore[reportArgumentType]
        ),
        deployment_actors=[
            DeploymentActorConfig(
                name=BOARD, actor_class=ray.remote(Board), actor_options={"num_cpus": 0}
            )
        ],
        logging_config=LoggingConfig(enable_access_log=False),
        **_scale(engine, num_replicas, autoscaling_config),
    ).bind(engine, server)
    routing = serve.deployment(
        serve.ingress()(RouteEndpoint),
        name=ROUTING,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        logging_config=LoggingConfig(enable_access_log=False),
    ).bind(deployment)
    # Ray's own way to hand the choice of a replica to a deployment, as its LLM layer does; not a
    # public interface yet, and so the reason for a version's upper bound.
    return deployment._with_ingress_request_router(routing)


def _scale(
    engine: EngineConfig, num_replicas: int | str, autoscaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    if num_replicas != "auto":
        if autoscaling is not None:
            problem = "does not go with a fixed number of replicas"
            raise SurefootError("autoscaling_config", problem, "set num_replicas to auto")
        if not isinstance(num_replicas, int) or num_replicas < 1:
            raise SurefootError("num_replicas", f"is {num_replicas!r}", "use 1 or more, or auto")
        return {"num_replicas": num_replicas}
    target = max(1, round(FULL_SHARE * engine.max_num_seqs))
    return {
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 100,
            "target_ongoing_requests": target,
            **(autoscaling or {}),
        }
    }


def _resources(engine: EngineConfig, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What Ray reserves for a replica. It sets the number of threads by the processors."""
    resources: dict[str, Any] = {"num_cpus": engine.threads or 1}
    if engine.device == "cuda":
        resources["num_gpus"] = 1
    return {**resources, **(options or {})}
