"""What the Serve application is built of, without a cluster: options, errors, manifests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

from surefoot.config import EngineConfig
from surefoot.errors import SurefootError
from surefoot.ray import build_app, local
from surefoot.ray.application import PROXY_VARIABLES
from surefoot.server.serve import ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUREFOOT_API_KEY", raising=False)
    for name in PROXY_VARIABLES:
        monkeypatch.setenv(name, "1")


def deployment(**args: Any) -> Any:
    return build_app(args)._bound_deployment


def configured(**args: Any) -> tuple[EngineConfig, ServerConfig]:
    engine, server = deployment(**args).init_args
    return engine, server


def test_options_may_be_texts() -> None:
    engine, server = configured(max_num_seqs="8", model="x", max_queue="3", names=["a", "b"])
    assert (engine.max_num_seqs, engine.model) == (8, "x")
    assert (server.max_queue, server.names) == (3, ("a", "b"))
    assert deployment(num_replicas="3").num_replicas == 3


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_API_KEY", "one two")
    assert configured()[1].api_keys == ("one", "two")
    monkeypatch.setenv("SUREFOOT_API_KEY", " ")
    with pytest.raises(SurefootError, match="api_key"):
        build_app({})


def test_replicas_follow_the_load_where_asked_to() -> None:
    auto = deployment(num_replicas="auto", max_num_seqs=40, autoscaling_config={"max_replicas": 7})
    config = auto._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 7, 30)
    fixed = deployment(num_replicas=2)
    assert fixed._deployment_config.autoscaling_config is None and fixed.num_replicas == 2


def test_a_gpu_is_reserved_where_one_is_used() -> None:
    assert deployment(threads=3).ray_actor_options == {"num_cpus": 3}
    assert deployment(device="cuda").ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    options = {"num_gpus": 0.5, "resources": {"fast": 1}}
    wanted = deployment(device="cuda", ray_actor_options=options).ray_actor_options
    assert wanted == {"num_cpus": 1, **options}


def test_draining_lasts_as_long_as_asked() -> None:
    assert deployment(shutdown_timeout="90")._deployment_config.graceful_shutdown_timeout_s == 90


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ({"port": 8000}, "port"),
        ({"ssl_certfile": "x"}, "ssl_certfile"),
        ({"max_num_seq": 3}, "max_num_seq"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_queue": -1}, "max_queue"),
        ({"device": "cuda:1"}, "device"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": "some"}, "num_replicas"),
        ({"autoscaling_config": {}}, "autoscaling_config"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_named(args: dict[str, Any], option: str) -> None:
    with pytest.raises(SurefootError) as error:
        build_app(args)
    assert error.value.option == option


@pytest.mark.parametrize("name", PROXY_VARIABLES)
def test_the_proxy_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(SurefootError, match=f"set {name}=1"):
        build_app({})


@pytest.mark.parametrize(
    ("replicas", "server", "option"),
    [
        (0, ServerConfig(), "replicas"),
        (2, ServerConfig(uds="/tmp/x"), "uds"),
        (2, ServerConfig(port=8000, host="nowhere.invalid"), "host"),
    ],
    ids=str,
)
def test_one_hosts_mistakes_show_at_once(replicas: int, server: ServerConfig, option: str) -> None:
    with pytest.raises(SurefootError) as error:
        local.serve_replicas(EngineConfig(), server, replicas)
    assert error.value.option == option


def test_without_ray_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; from surefoot.ray import build_app; build_app({})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'surefoot[ray]'" in result.stderr


def proxy_settings(tmp_path: Path) -> dict[str, str]:
    """What a Ray needs, less what is for one that shares a machine with others."""
    settings = {name: str(value) for name, value in local._settings(tmp_path).items()}
    own = ("PORT", "SOCKET_PATH", "FILE", "FILE_LOC", "BASE", "ENABLED", "VERBOSITY", "PERIOD_S")
    return {name: value for name, value in settings.items() if not name.endswith(own)}


def test_the_manifest_sets_what_one_host_sets(tmp_path: Path) -> None:
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]
    cluster = service["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    settings = proxy_settings(tmp_path)
    assert set(PROXY_VARIABLES) < settings.keys()
    for group in groups:
        [container] = group["template"]["spec"]["containers"]
        given = {item["name"]: item.get("value") for item in container["env"]}
        assert given.pop("SUREFOOT_API_KEY") is None
        assert given == settings
    exported = set((DOCS / "scale.md").read_text().split())
    for name, value in settings.items():
        assert f"{name}={value}" in exported or f'{name}="{value.split()[0]}' in exported


@pytest.mark.parametrize("file", ["serve.yaml", "kuberay.yaml"])
def test_the_applications_of_the_manifests_are_built(file: str) -> None:
    whole = yaml.safe_load((DEPLOY / file).read_text())
    if file == "kuberay.yaml":
        whole = yaml.safe_load(whole["spec"]["serveConfigV2"])
    [application] = whole["applications"]
    assert application["import_path"] == "surefoot.ray:build_app"
    assert build_app(application["args"])._bound_deployment.name == "surefoot"
