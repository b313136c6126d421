"""The image is built, and a server and four sites are started from their compose files: the simulator's model."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.containers import ContainerEngine
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.deploy_folder import DEFAULT_IMAGE, SUPERLINK, Deployment, write_deploy_folder
from fedauc.federation.local_federation import find_free_port, write_demo_sites
from federation.transports import SITES, read_trained_weights, simulate_weights

pytestmark = pytest.mark.deploy

OWNER = 12345
"""A user that neither the machine nor the image knows."""

HOST = "fed.example.org"

SANDBOX = """
services:
  {service}:
    network_mode: host
    extra_hosts: ["{host}:127.0.0.1"]
    ulimits: {{nofile: 4096, nproc: 4096}}
"""
"""What this machine lacks: a network for containers, a name for the server, and the right to raise limits."""


@pytest.fixture
def app() -> Iterator[Path]:
    """An app as `init` writes it, in a folder whose parents everybody may enter."""
    parent = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="fedauc-"))
    parent.chmod(0o755)
    folder = parent / "hospitals"
    create_app_folder(folder, SITES, [HOST])
    write_deploy_folder(folder, Deployment(folder, list(SITES), HOST, find_free_port()))
    write_demo_sites(folder / "sites", list(SITES))
    yield folder
    shutil.rmtree(parent)


def complete_site(app: Path, name: str) -> Path:
    """What a site adds to its folder: its key, its policy, its rows, and who owns them."""
    home = app / "deploy" / "sites" / name
    shutil.copy(app / "keys" / name, home / "secrets" / name)
    (home / "config" / "policy.toml").write_text('[disclosure]\nscores = "nothing"\n')
    shutil.copytree(app / "sites" / name / "rows", home / "data" / "rows")
    (home / ".env").write_text(f"FEDAUC_USER={OWNER}:{OWNER}\nFEDAUC_TABLE=rows\n")
    (home / "sandbox.yaml").write_text(SANDBOX.format(service="site", host=HOST))
    return home


def give_to_owner(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, OWNER, OWNER)


def wait_until_healthy(engine: ContainerEngine, container: str) -> None:
    """The check that the compose file or the image names, until it succeeds."""
    end = time.monotonic() + 120
    while (checked := engine.run("podman", "healthcheck", "run", container, check=False)).returncode:
        if time.monotonic() > end:
            logs = engine.run("podman", "logs", "--tail", "30", container, check=False)
            pytest.fail(f"{container} is not well: {checked.stdout} {checked.stderr} {logs.stdout} {logs.stderr}")
        time.sleep(1)


def read_container(engine: ContainerEngine, name: str) -> dict[str, Any]:
    (described,) = json.loads(engine.run("podman", "container", "inspect", name).stdout)
    assert isinstance(described, dict)
    return described


def test_server_and_sites_train_in_containers_that_can_write_their_state_only(app: Path, tmp_path: Path) -> None:
    with ContainerEngine() as engine:
        engine.build_image(app / "deploy" / "image", tmp_path)
        found = engine.run(
            "podman", "run", "--rm", DEFAULT_IMAGE, "sh", "-c", "command -v gcc cc c++ make", check=False
        )
        assert (found.stdout, found.returncode != 0) == ("", True)

        server = app / "deploy" / "server"
        (server / "sandbox.yaml").write_text(SANDBOX.format(service="server", host=HOST))
        homes = {name: complete_site(app, name) for name in SITES}
        give_to_owner(app)
        settings = {"FEDAUC_USER": f"{OWNER}:{OWNER}"}
        engine.compose(server, "up", "--detach", settings=settings)
        wait_until_healthy(engine, "fedauc-server_server_1")
        inside = ("podman", "exec", "fedauc-server_server_1")
        for name in SITES:
            engine.run(
                *inside, "flwr", "supernode", "register", app / "keys" / f"{name}.pub", SUPERLINK, "--name", name
            )
        for name, home in homes.items():
            engine.compose(home, "up", "--detach")
            wait_until_healthy(engine, f"fedauc-{name}_site_1")
        config = read_container(engine, "fedauc-site-1_site_1")
        assert config["HostConfig"]["ReadonlyRootfs"] is True
        assert config["EffectiveCaps"] in (None, [])
        denied = engine.run("podman", "exec", "fedauc-site-1_site_1", "touch", "/data/rows/x.npy", check=False)
        assert "Read-only file system" in denied.stderr

        settings_of_run = 'cycles=2 deadline=300.0 method="cycp-minimax" evaluation="none"'
        words = ("fedauc", "federation", "run", app, SUPERLINK, "--run-config", settings_of_run)
        done = engine.run(*inside, *words, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        # SIGTERM reaches the site through tini, so that it leaves the server at once.
        began = time.monotonic()
        engine.run("podman", "stop", "--time", "30", "fedauc-site-1_site_1")
        assert time.monotonic() - began < 25
        assert read_container(engine, "fedauc-site-1_site_1")["State"]["ExitCode"] == 0
    expected = simulate_weights(app, "cycp-minimax", cycles=2)
    np.testing.assert_allclose(read_trained_weights(app / "run"), expected, rtol=0, atol=1e-6)
    assert {path.owner() if path.stat().st_uid != OWNER else OWNER for path in (app / "run").iterdir()} == {OWNER}
