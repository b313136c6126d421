"""Real processes of this version and of an earlier commit, which refuse each other clearly, and before a round.

Run with `make test-federation`. The earlier version is a commit of this repository, so that its history is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.local_federation import LocalFederation, write_demo_sites
from fedauc.federation.server import read_failure
from fedauc.federation.versions import MESSAGE_FORMAT
from fedauc.version import VERSION
from federation.test_real import wait_for_end

pytestmark = pytest.mark.flower

EARLIER_COMMIT = "9fc05d4"
"""The last one before sites had a worker, a policy and a schema; its messages do not say their format."""

SITES = {"site-0": "a", "site-1": "b"}


@pytest.fixture(scope="module")
def earlier_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `src` folder of the earlier commit."""
    folder, root = tmp_path_factory.mktemp("earlier"), Path(__file__).parents[2]
    archived = subprocess.run(["git", "-C", str(root), "archive", EARLIER_COMMIT, "src"], capture_output=True)
    if archived.returncode:
        pytest.skip(f"commit {EARLIER_COMMIT} is not here: fetch the repository's history")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archived.stdout, check=True)
    return folder / "src"


def test_a_site_of_an_earlier_version_is_refused_before_the_first_round(earlier_source: Path, tmp_path: Path) -> None:
    """It has no SiteTable, which the app's data.py asks for, and still answers: its own code says that it failed."""
    folder = tmp_path / "trial"
    create_app_folder(folder, SITES)
    write_demo_sites(folder / "sites", list(SITES))
    with LocalFederation(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
        trial.start_site("site-0")
        trial.resident_workers = False
        trial.start_site("site-1", {"PYTHONPATH": str(earlier_source)})
        trial.start_run("cycles=1 deadline=60.0")
        wait_for_end(trial)
        outcome = trial.read_run_outcome()
    assert not outcome.completed
    expected = (
        f"site 'site-1': the site runs an earlier fedauc (messages of format 1); the server runs fedauc {VERSION} "
        f"(format {MESSAGE_FORMAT}): upgrade fedauc at the site"
    )
    assert expected in outcome.reason
    assert read_failure(folder / "run").startswith(expected)
    assert not (folder / "run").exists()


def test_a_server_of_an_earlier_version_is_refused_by_every_site(earlier_source: Path, tmp_path: Path) -> None:
    folder, earlier = tmp_path / "trial", {"PYTHONPATH": str(earlier_source)}
    program = "import sys, pathlib, fedauc.federation.app_folder as f; f.create_app_folder(pathlib.Path(sys.argv[1]), "
    arguments = [sys.executable, "-c", f"{program}{SITES!r})", str(folder)]
    subprocess.run(arguments, check=True, env={**earlier, "OMP_NUM_THREADS": "1"})
    write_demo_sites(folder / "sites", list(SITES))
    with LocalFederation(folder, resident_workers=False, environment=earlier) as trial:
        # An earlier fedauc has no SuperLink of its own.
        trial.start_superlink()
        trial.resident_workers = True
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name, {"PYTHONPATH": ""})
        trial.start_run("cycles=1 deadline=60.0")
        wait_for_end(trial)
        outcome = trial.read_run_outcome()
    refusal = (
        f"the server runs an earlier fedauc (messages of format 1); this site runs fedauc {VERSION} "
        f"(format {MESSAGE_FORMAT}): upgrade fedauc at the server"
    )
    assert not outcome.completed
    for name in SITES:
        assert refusal in (folder / "logs" / f"{name}.log").read_text()
