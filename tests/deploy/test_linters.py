"""Every file that `fedauc federation init` writes into deploy/ is accepted by the linter of its kind.

hadolint for the Dockerfile, the schema of compose files and podman-compose, the schemas of Kubernetes, yamllint, and
systemd-analyze, which needs systemd's package.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.deploy_folder import Deployment, write_deploy_folder

pytestmark = pytest.mark.deploy

YAML_RULES = "{extends: default, rules: {line-length: {max: 120}, document-start: disable}}"

KUBERNETES_VERSIONS = ("1.29", "1.33", "1.37")

MOST_EXPOSURE = 2.0
"""What systemd-analyze may say of a unit at most; 10 is a service without any protection."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lint") / "hospitals"
    # What pytest calls its folders would make lines too long.
    path = Path("/srv/hospitals")
    sites = {"north": "day", "South-2": "night"}
    create_app_folder(folder, sites, ["fed.example.org"])
    write_deploy_folder(folder, Deployment(path, list(sites), "fed.example.org"))
    return folder


def run_tool(name: str, *arguments: str | Path, **settings: str) -> str:
    """The output of a program that must find nothing."""
    path = Path(sys.executable).parent / name
    command = [str(path) if path.exists() else name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings or None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_hadolint_accepts_the_dockerfile(app: Path) -> None:
    dockerfile = app / "deploy" / "image" / "Dockerfile"
    assert run_tool("hadolint", dockerfile) == ""
    # A linter that accepts everything would prove nothing.
    dockerfile.with_name("Worse").write_text(re.sub("(?m)^USER.*$", "USER root", dockerfile.read_text()))
    with pytest.raises(AssertionError, match="DL3002"):
        run_tool("hadolint", dockerfile.with_name("Worse"))


def test_yamllint_accepts_every_yaml_file(app: Path) -> None:
    files = sorted(app.rglob("*.yaml"))
    assert len(files) == 9
    run_tool("yamllint", "--strict", "--config-data", YAML_RULES, *files)


def test_compose_files_fit_the_schema(app: Path) -> None:
    files = sorted(app.glob("deploy/**/compose.yaml"))
    assert len(files) == 3
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    broken = app / "broken.yml"
    broken.write_text(files[0].read_text().replace("read_only: true", "read_onyl: true"))
    with pytest.raises(AssertionError, match="read_onyl"):
        run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", broken)


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman-compose asks podman for its version; install podman")
def test_compose_files_are_understood(app: Path) -> None:
    for path in sorted(app.glob("deploy/**/compose.yaml")):
        described = run_tool("podman-compose", "--file", path, "config", FEDAUC_USER="1:1", PATH="/usr/bin:/bin")
        (service,) = yaml.safe_load(described)["services"].values()
        assert service["read_only"] is True
        assert "${" not in described


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_manifests_fit_the_schemas_of_kubernetes(app: Path, version: str) -> None:
    files = sorted(app.glob("deploy/**/kubernetes.yaml"))
    assert len(files) == 3
    shown = run_tool("kubernetes-validate", "--strict", "--kubernetes-version", version, *files)
    for kind in ("statefulset", "deployment", "service", "networkpolicy", "persistentvolumeclaim"):
        assert f"passed for resource {kind}/" in shown


def test_every_file_that_kustomize_collects_exists(app: Path) -> None:
    """A site's policy and key are its own, so that they do not exist yet."""
    for path in app.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        generators = (*content["configMapGenerator"], *content["secretGenerator"])
        names = [entry.rpartition("=")[2] for generator in generators for entry in generator["files"]]
        missing = {name for name in (*names, *content["resources"]) if not (path.parent / name).is_file()}
        site = path.parent.name
        assert missing == (set() if path.parent == app else {"config/policy.toml", f"secrets/{site}"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units_and_finds_them_protected(app: Path, tmp_path: Path) -> None:
    for unit in sorted(app.rglob("*.service")):
        # The programs are installed where the unit says on the machine that it is for.
        text = unit.read_text().replace("/opt/fedauc/bin/", f"{Path(sys.executable).parent}/")
        (tmp_path / unit.name).write_text(text)
        shown = run_tool("systemd-analyze", "verify", "--man=no", tmp_path / unit.name)
        assert unit.name not in shown, shown
        exposure = run_tool("systemd-analyze", "security", "--offline=true", "--no-pager", tmp_path / unit.name)
        found = re.search(r"Overall exposure level for \S+: ([\d.]+)", exposure)
        assert found is not None
        assert float(found[1]) <= MOST_EXPOSURE


def test_every_option_of_the_server_exists(app: Path) -> None:
    shown = run_tool("flower-superlink", "--help")
    unit = (app / "deploy" / "server" / "fedauc-server.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*?[^\\])$", unit, re.MULTILINE | re.DOTALL)
    options = set(re.findall(r"--[a-z-]+", command))
    assert len(options) == 8
    assert options <= set(re.findall(r"--[a-z-]+", shown))
