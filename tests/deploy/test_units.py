"""Server and sites run by the commands of their systemd units, as a user without rights: the simulator's model."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from deploy.unit_runner import USER, Unit, read_unit, start_unit, stop_unit
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.deploy_folder import SUPERLINK, Deployment, write_deploy_folder
from fedauc.federation.local_federation import find_free_port, write_demo_sites
from federation.transports import SITES, read_trained_weights, simulate_weights

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("setpriv") is None, reason="it needs root, unshare and setpriv"
    ),
]

HOST = "fed.example.org"


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


def wait_for(log: Path, text: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.2)


def read_site_unit(app: Path, name: str) -> Unit:
    return read_unit((app / "deploy" / "sites" / name / f"fedauc-{name}.service").read_text())


def prepare_site(app: Path, name: str) -> dict[str, tuple[Path, bool]]:
    """The folders that a site's unit names; for rows.csv a folder of arrays does as well."""
    home = app / "deploy" / "sites" / name
    shutil.copy(app / "keys" / name, home / "secrets" / name)
    (home / "config" / "policy.toml").write_text('[disclosure]\nscores = "nothing"\n')
    shutil.copytree(app / "sites" / name / "rows", home / "data" / "rows.csv")
    shutil.chown(home / "state", USER, USER)
    parts = {"/etc/fedauc/config": "config", "/srv/fedauc": "data", "/var/lib/fedauc": "state"}
    return {path: (home / part, part == "state") for path, part in parts.items()}


def test_the_commands_of_the_units_train_to_the_simulators_model(app: Path, tmp_path: Path) -> None:
    server = read_unit((app / "deploy" / "server" / "fedauc-server.service").read_text())
    assert server.credential == ("server.key", str(app / "certificates" / "server.key"))
    sites = {name: prepare_site(app, name) for name in SITES}
    for path in (app, app / "flower", *app.glob("*.toml"), app / "fedauc_app"):
        shutil.chown(path, USER, USER)
    shutil.chown(app / "flower" / "config.toml", USER, USER)
    folders, log = {str(app): (app, True)}, tmp_path / "server.log"
    operator = tmp_path / "operator.log"

    def run_operator(*words: str) -> None:
        """A command of the operator on the server, as the service's user."""
        process = start_unit(server, folders, app / "certificates" / "server.key", operator, list(words))
        assert process.wait(300) == 0, operator.read_text()[-3000:]

    with ExitStack() as stack:
        running = start_unit(server, folders, app / "certificates" / "server.key", log)
        stack.callback(running.kill)
        check = ("python", "-m", "fedauc.federation.health", "--server", read_address(app))
        end = time.monotonic() + 90
        while start_unit(
            server,
            folders,
            app / "certificates" / "server.key",
            operator,
            [*check, "--certificate", str(app / "certificates" / "ca.pem")],
        ).wait():
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(1)
        for name in SITES:
            run_operator("flwr", "supernode", "register", str(app / "keys" / f"{name}.pub"), SUPERLINK, "--name", name)
        processes = {}
        for name, site_folders in sites.items():
            unit, site_log = read_site_unit(app, name), tmp_path / f"{name}.log"
            key = app / "deploy" / "sites" / name / "secrets" / name
            processes[name] = start_unit(unit, site_folders, key, site_log)
            stack.callback(processes[name].kill)
        for name in SITES:
            wait_for(tmp_path / f"{name}.log", "connected to")
        settings = 'cycles=2 deadline=300.0 method="cycp-minimax" evaluation="none"'
        run_operator("fedauc", "federation", "run", str(app), SUPERLINK, "--run-config", settings)
        # SIGTERM ends a site and the server by themselves, within the time that the units give them.
        assert {stop_unit(process) for process in processes.values()} == {0}
        assert stop_unit(running) in (0, -15)
    expected = simulate_weights(app, "cycp-minimax", cycles=2)
    np.testing.assert_allclose(read_trained_weights(app / "run"), expected, rtol=0, atol=1e-6)
    # Nothing was written but the state, and by no other user.
    home = app / "deploy" / "sites" / "site-1"
    assert {path.stat().st_uid for path in (home / "state").rglob("*")} == {USER}
    assert {path.stat().st_uid for path in (app / "run").rglob("*")} == {USER}


def read_address(app: Path) -> str:
    (line,) = (line for line in (app / "flower" / "config.toml").read_text().splitlines() if line.startswith("address"))
    return line.partition('"')[2].rstrip('"')
