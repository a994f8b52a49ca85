"""The files in `deploy/` say what the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmserve.__main__ import build_parser, server_config
from mmserve.deploy.command import launch_of, with_gpus_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def dockerfile(word: str) -> list[str]:
    text = (FOLDER / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return re.findall(rf"^{word} (.+)$", text, re.MULTILINE)


def words(lines: list[str]) -> list[str]:
    found: list[str] = yaml.safe_load(lines[-1])
    return found


def test_the_image_runs_a_command_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert words(dockerfile("ENTRYPOINT")) == ["mmserve"]
    args = build_parser().parse_args(words(dockerfile("CMD")))
    assert args.host == "0.0.0.0"


def test_the_image_has_every_extra_that_it_names() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    ((names,),) = (
        re.findall(r"\.\[([a-z,]+)\]", line) for line in dockerfile("RUN") if ".[" in line
    )
    for name in names.split(","):
        assert f"\n{name} = [" in text


def test_the_compose_file_deploys_with_flags_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (compose,) = documents("compose.yaml")
    service = compose["services"]["mmserve"]
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    given(monkeypatch, service["environment"])
    command, *flags = service["command"]
    launch = launch_of(parsed(command, flags), server_config(parsed(command, flags)), flags)
    assert launch.replicas == 3 and not launch.near
    (port,) = {int(each.partition(":")[2]) for each in service["ports"]}
    assert port == parsed(command, flags).port


def test_the_ray_service_deploys_with_flags_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, claim = documents("rayservice.yaml")
    assert (service["kind"], service["apiVersion"]) == ("RayService", "ray.io/v1")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, name = app["import_path"].split(":")
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")
    assert f"def {name}(args" in source
    cluster = service["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (each["template"]["spec"] for each in pods):
        (container,) = pod["containers"]
        given(monkeypatch, {each["name"]: "key" for each in container["env"]})
        claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"]}
        assert claims == {claim["metadata"]["name"]}
    flags = ["--host", "0.0.0.0", *app["args"]["flags"]]
    args = parsed("deploy", flags)
    launch = launch_of(args, server_config(args), flags)
    (workers,) = cluster["workerGroupSpecs"]
    assert (launch.replicas, launch.max_replicas) == (
        workers["minReplicas"],
        workers["maxReplicas"],
    )
    assert launch.gpus == int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert with_gpus_of(launch, 0).gpus == 0


def test_what_the_documentation_types_is_what_the_program_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MMSERVE_API_KEY", "key")
    text = (ROOT / "docs" / "deploy.md").read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:[A-Z_]+=\S+ )*mmserve (.+?)(?: +#.*)?$", text, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        build_parser().parse_args(shlex.split(line))


def parsed(command: str, flags: list[str]) -> Any:
    return build_parser().parse_args([command, *flags])


def given(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Names that the program reads, as in the file."""
    known = {*re.findall(r"MMSERVE_[A-Z_]+", (ROOT / "mmserve/__main__.py").read_text("utf-8"))}
    assert environment.keys() <= known
    for name in environment:
        monkeypatch.setenv(name, "key")
