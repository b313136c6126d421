"""The files that start a server and its sites agree with each other and with the code.

They are linted and started by `make test-deploy`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from fedauc.cli.federation import app as federation_commands
from fedauc.federation import health
from fedauc.federation.app_folder import create_certificates
from fedauc.federation.deploy_folder import (
    TORCH_VERSION,
    Deployment,
    check_deployment,
    make_deploy_files,
    write_deploy_folder,
)
from fedauc.version import VERSION

ROOT = Path(__file__).parents[2]

DEPLOYMENT = Deployment(Path("/srv/hospitals"), ["north", "South-2"], "fed.example.org", 9443, has_schema=True)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return make_deploy_files(DEPLOYMENT)


def read_exec_start(unit: str) -> list[str]:
    """The words of a unit's command."""
    (command,) = re.findall(r"^ExecStart=(.*?[^\\])$", unit, re.MULTILINE | re.DOTALL)
    return shlex.split(command.replace("\\\n", " "))


def read_options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def read_commands(files: dict[str, str], part: str) -> dict[str, list[str]]:
    """The command that starts the server or a site, by the file that holds it."""
    commands = {}
    for path, text in files.items():
        if not path.startswith(f"deploy/{part}/"):
            continue
        if path.endswith(".service"):
            commands[path] = read_exec_start(text)
        elif path.endswith("compose.yaml"):
            (service,) = yaml.safe_load(text)["services"].values()
            commands[path] = service["command"]
        elif path.endswith("kubernetes.yaml"):
            (workload,) = [
                member for member in yaml.safe_load_all(text) if member["kind"] in ("StatefulSet", "Deployment")
            ]
            (container,) = workload["spec"]["template"]["spec"]["containers"]
            commands[path] = container["args"]
    assert len(commands) == 3
    return commands


def test_every_placeholder_is_filled_in(files: dict[str, str]) -> None:
    assert not {path: found for path, text in files.items() if (found := re.findall(r"@[A-Z_]+@", text))}
    assert not [path for path, text in files.items() for line in text.splitlines() if line != line.rstrip()]


def test_a_site_is_started_in_the_same_way_by_all_three_and_with_options_that_exist(files: dict[str, str]) -> None:
    command: Any = typer.main.get_command(federation_commands)
    known = {option for parameter in command.commands["site"].params for option in parameter.opts}
    commands = read_commands(files, "sites/north")
    for words in commands.values():
        assert words[1 if words[0].startswith("-") else 0].endswith("fedauc")
        assert words[1:3] == ["federation", "site"]
        assert read_options(words) == known
        assert any("fed.example.org:9443" in word for word in words)
        assert 'data="' in " ".join(words)
        assert 'state="/var/lib/fedauc" policy="' in " ".join(words)


def test_a_server_is_started_in_the_same_way_by_all_three(files: dict[str, str]) -> None:
    commands = read_commands(files, "server")
    assert len({frozenset(read_options(words)) for words in commands.values()}) == 1
    for words in commands.values():
        assert words[0].endswith("fedauc")
        assert words[1:3] == ["federation", "superlink"]
        assert {"--enable-supernode-auth", "--ssl-keyfile", "--database"} <= read_options(words)
        assert "--insecure" not in words


def test_ports_hosts_and_images_agree(files: dict[str, str]) -> None:
    compose = yaml.safe_load(files["deploy/server/compose.yaml"])["services"]["server"]
    assert compose["ports"] == ["9443:9443"]
    assert compose["extra_hosts"] == ["fed.example.org:127.0.0.1"]
    manifests = {member["kind"]: member for member in yaml.safe_load_all(files["deploy/server/kubernetes.yaml"])}
    assert manifests["Service"]["spec"]["ports"][0]["port"] == 9443
    assert manifests["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"] == 9443
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["ports"][0]["containerPort"] == 9443
    assert "EXPOSE 9443" in files["deploy/image/Dockerfile"]
    assert 'address = "fed.example.org:9443"' in files["flower/config.toml"]
    images = re.findall(r"(?m)^ +image: (?:\$\{FEDAUC_IMAGE:-)?([^\s}]+)", "\n".join(files.values()))
    assert set(images) == {f"localhost/fedauc:{VERSION}"}
    assert f"fedauc=={VERSION}" in files["deploy/image/Dockerfile"]


def test_what_kustomize_collects_is_what_the_pods_mount(files: dict[str, str]) -> None:
    server = yaml.safe_load(files["kustomization.yaml"])
    listed = dict(entry.split("=") for entry in server["configMapGenerator"][0]["files"])
    stateful = next(m for m in yaml.safe_load_all(files["deploy/server/kubernetes.yaml"]) if m["kind"] == "StatefulSet")
    volumes = {volume["name"]: volume for volume in stateful["spec"]["template"]["spec"]["volumes"]}
    mounted = {item["key"]: item["path"] for item in volumes["settings"]["configMap"]["items"]}
    assert mounted == listed
    assert {"fedauc_app/data.py", "pyproject.toml", "sites.toml", "schema.toml"} <= set(listed.values())
    for site in ("north", "South-2"):
        kustomization = yaml.safe_load(files[f"deploy/sites/{site}/kustomization.yaml"])
        names = {entry["name"] for part in ("configMapGenerator", "secretGenerator") for entry in kustomization[part]}
        manifests = files[f"deploy/sites/{site}/kubernetes.yaml"]
        assert all(name in manifests and name == name.lower() for name in names)


def test_containers_can_write_nothing_but_their_state_and_have_no_rights(files: dict[str, str]) -> None:
    for path in ("deploy/server/compose.yaml", "deploy/sites/north/compose.yaml"):
        (service,) = yaml.safe_load(files[path])["services"].values()
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["logging"]["options"]["max-size"]
    site = yaml.safe_load(files["deploy/sites/north/compose.yaml"])["services"]["site"]
    assert {volume["target"] for volume in site["volumes"] if not volume.get("read_only")} == {"/var/lib/fedauc"}
    for path in ("deploy/server/fedauc-server.service", "deploy/sites/north/fedauc-north.service"):
        for line in ("ProtectSystem=strict", "NoNewPrivileges=true", "RestartSec=10", "Restart=always", "User=fedauc"):
            assert line in files[path].splitlines()


def test_the_health_checks_that_the_files_name_can_be_called(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compose = yaml.safe_load(files["deploy/server/compose.yaml"])["services"]["server"]
    deployment = [
        m for m in yaml.safe_load_all(files["deploy/sites/north/kubernetes.yaml"]) if m["kind"] == "Deployment"
    ]
    (container,) = deployment[0]["spec"]["template"]["spec"]["containers"]
    image_check = re.search(r'CMD (\["python".*\])', files["deploy/image/Dockerfile"])
    assert image_check is not None
    for words in (
        compose["healthcheck"]["test"][1:],
        container["readinessProbe"]["exec"]["command"],
        yaml.safe_load(image_check[1]),
    ):
        assert words[:3] == ["python", "-m", "fedauc.federation.health"]
        monkeypatch.setattr("sys.argv", words[2:])
        # There is no such server and no such site; options that do not exist would end with the code 2.
        with pytest.raises(SystemExit) as end:
            health.main()
        assert isinstance(end.value.code, str)


def test_the_image_has_the_versions_that_the_tests_run_with() -> None:
    def read_pins(name: str) -> dict[str, str]:
        lines = [line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#")]
        return dict(line.split()[0].lower().split("==") for line in lines)

    image, flower, tests = (read_pins(f"constraints{name}.txt") for name in ("-image", "-flower", ""))
    assert {name: version for name, version in image.items() if name in flower} == {
        name: flower[name] for name in image if name in flower
    }
    assert {name: tests[name] for name in set(image) - set(flower)} == {
        name: image[name] for name in set(image) - set(flower)
    }
    assert set(flower) - set(image) == {"execnet", "iniconfig", "pluggy", "pytest", "pytest-timeout", "pytest-xdist"}
    locked = read_pins("src/fedauc/federation/deploy_template/requirements.txt")
    assert locked == {name: version for name, version in image.items() if name != "torch"}
    assert image["torch"] == TORCH_VERSION


def make_app(folder: Path) -> Deployment:
    create_certificates(folder / "certificates", ["fed.example.org"])
    (folder / "schema.toml").write_text('label = "died"\n')
    return DEPLOYMENT._replace(app=folder)


def test_a_site_gets_a_folder_with_everything_but_its_secret_its_policy_and_its_rows(tmp_path: Path) -> None:
    deployment = make_app(tmp_path)
    assert write_deploy_folder(tmp_path, deployment) == []
    home = tmp_path / "deploy" / "sites" / "north"
    assert {path.name for path in home.iterdir()} == {
        *("compose.yaml", "kubernetes.yaml", "kustomization.yaml", "fedauc-north.service", "sysusers.conf"),
        *("config", "secrets", "state", "data"),
    }
    assert {path.name for path in (home / "config").iterdir()} == {"ca.pem", "schema.toml"}
    assert not list((tmp_path / "deploy").rglob("*.key"))


def test_a_file_that_was_changed_is_kept_unless_it_shall_be_replaced(tmp_path: Path) -> None:
    deployment = make_app(tmp_path)
    write_deploy_folder(tmp_path, deployment)
    unit = tmp_path / "deploy" / "server" / "fedauc-server.service"
    unit.write_text(unit.read_text() + "# ours\n")
    assert write_deploy_folder(tmp_path, deployment) == [unit]
    assert unit.read_text().endswith("# ours\n")
    assert write_deploy_folder(tmp_path, deployment, replace=True) == []
    assert "# ours" not in unit.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": 'fed.example.org" x="'}, "host is"),
        ({"app": Path("/srv/my hospitals")}, "app is '/srv/my hospitals'; use letters, digits"),
        ({"port": 70000}, "port is 70000; it must be between 1 and 65535"),
        ({"sites": ["north", "North"]}, "capital letters only"),
    ],
)
def test_values_that_would_mean_something_else_in_a_file_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_deployment(DEPLOYMENT._replace(**changes))
