"""Container images and the systemd unit name files, options and paths that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from starlette.routing import Route

from surefoot.cli.main import app
from surefoot.server import serve
from surefoot.server.app import create_app
from surefoot.server.core_process import STOP_SECONDS
from surefoot.server.serve import ServerConfig

ROOT = Path(__file__).parents[2]
LONGEST_STOP = ServerConfig().shutdown_timeout + serve.UNREAD_SECONDS + STOP_SECONDS


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, its arguments), comments left out and lines joined."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    pairs = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line]
    return [(name, rest) for name, rest in pairs]


def only(name: str) -> str:
    [rest] = [rest for instruction, rest in dockerfile() if instruction == name]
    return rest


def parse(arguments: list[str]) -> dict[str, Any]:
    """What ``surefoot ARGUMENTS`` would run with; fails for what it does not know."""
    command: Any = typer.main.get_command(app)
    name, verb, rest = command.resolve_command(typer.Context(command), arguments)
    return verb.make_context(name, rest).params


def substituted(value: Any) -> Any:
    """Compose's ``${NAME:-default}`` where no variable is set."""
    if isinstance(value, list):
        return [substituted(item) for item in value]
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())["services"]["surefoot"]


def test_copied_files_exist_and_reach_the_builder() -> None:
    ignored, *kept = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored == "*"
    for instruction, rest in dockerfile():
        if instruction == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in kept


def test_stages_and_arguments_exist() -> None:
    froms = [rest.split() for instruction, rest in dockerfile() if instruction == "FROM"]
    stages = {words[2] for words in froms if "AS" in words}
    assert froms[-1] == ["torch-${TORCH}"] and {"torch-cpu", "torch-cuda"} <= stages
    declared = {rest.partition("=")[0] for name, rest in dockerfile() if name == "ARG"}
    for file in ("compose.yaml", "compose.cuda.yaml"):
        assert compose(file)["build"]["args"].keys() <= declared


def test_image_serves_as_nobody_in_particular() -> None:
    assert json.loads(only("ENTRYPOINT")) == ["surefoot"]
    options = parse(json.loads(only("CMD")))
    assert options["host"] == "0.0.0.0" and options["port"] == int(only("EXPOSE"))
    assert int(only("USER")) > 0
    folder = only("VOLUME")
    assert f"SUREFOOT_CACHE={folder} " in only("ENV")
    assert f"--home-dir {folder} " in next(rest for _, rest in dockerfile() if "useradd" in rest)


def test_health_check() -> None:
    command = json.loads(only("HEALTHCHECK").partition("CMD")[2])
    [(port, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1])
    assert port == only("EXPOSE")
    routes = create_app(service=None).routes  # type: ignore[arg-type]
    [methods] = [
        route.methods for route in routes if isinstance(route, Route) and route.path == path
    ]
    assert "GET" in (methods or ())
    compile(command[-1], "health check", "exec")


def test_compose() -> None:
    plain, cuda = compose("compose.yaml"), compose("compose.cuda.yaml")
    assert parse(substituted(plain["command"]))["host"] == "0.0.0.0"
    assert parse(substituted(cuda["command"]))["device"] == "cuda"
    assert plain["volumes"] == [f"cache:{only('VOLUME')}"]
    assert plain["ports"] == [f"127.0.0.1:8000:{only('EXPOSE')}"]
    assert int(plain["stop_grace_period"].removesuffix("s")) > LONGEST_STOP
    # An empty key would be refused: it is handed on only where it is set.
    assert "SUREFOOT_API_KEY" in plain["environment"]


def test_commands_of_the_readme() -> None:
    section = (ROOT / "README.md").read_text().split("## In a container")[1].split("\n## ")[0]
    block = section.split("```sh")[1].split("```")[0].replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    images = {
        words[words.index("--tag") + 1] for words in lines if words[:2] == ["docker", "build"]
    }
    ran = 0
    for words in lines:
        if words[:2] == ["docker", "run"]:
            [image] = images & set(words)
            arguments = words[words.index(image) + 1 :]
            assert not arguments or parse(arguments)["host"] == "0.0.0.0"
            assert f"surefoot:{only('VOLUME')}" in words
            assert int(words[words.index("--stop-timeout") + 1]) > LONGEST_STOP
            ran += 1
        for place, word in enumerate(words):
            if word == "--file":
                assert (ROOT / words[place + 1]).is_file()
    assert ran == len(images) == 2


@pytest.fixture
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "deploy" / "surefoot.service")
    return parser["Service"]


def test_systemd_unit(unit: configparser.SectionProxy) -> None:
    path, *arguments = unit["ExecStart"].replace("$SUREFOOT_OPTIONS", "").split()
    assert Path(path).name == "surefoot"
    parse(arguments)
    assert float(unit["TimeoutStopSec"]) > LONGEST_STOP
    assert unit["SuccessExitStatus"] == str(serve.TERMINATED)
    assert unit["Environment"].split()[0] == f"SUREFOOT_CACHE=%C/{unit['CacheDirectory']}"
