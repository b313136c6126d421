"""The files that a federation on NVFlare needs, written without NVFlare; `test_nvflare.py` runs them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.federation.nvflare_federation import PARTS, allow_fedauc, write_job


@pytest.fixture
def site_table(tmp_path: Path) -> Path:
    path = tmp_path / "sites.toml"
    path.write_text('[north]\ngroup = "day"\n\n[south]\ngroup = "night"\n')
    return path


def make_kit(folder: Path) -> Path:
    """What of a startup kit is read: the site's resources as NVFlare provisions them."""
    (folder / "local").mkdir(parents=True)
    resources = {"class_list_enforcement_mode": "enforce", "class_allow_list": ["nvflare.x.Y"], "components": []}
    (folder / "local" / "resources.json.default").write_text(json.dumps(resources))
    rights = {"project_admin": "any", "lead": {"view": "any", "byoc": "any", "shell_commands": "o:site"}}
    (folder / "local" / "authorization.json.default").write_text(json.dumps({"permissions": rights}))
    return folder


def test_a_job_gives_the_settings_to_the_server_alone(tmp_path: Path, site_table: Path) -> None:
    job = tmp_path / "job"
    settings = {"method": "cycp-minimax", "cycles": 3, "out": "/srv/run", "sites": str(site_table)}
    write_job(job, settings, min_sites=1)
    meta = json.loads((job / "meta.json").read_text())
    assert meta["min_clients"] == 1
    assert meta["deploy_map"] == {"coordinator": ["server"], "site": ["north", "south"]}
    server = json.loads((job / "coordinator/config/config_fed_server.json").read_text())
    assert [part["path"] for part in server["workflows"]] == [PARTS[0]]
    assert server["workflows"][0]["args"]["settings"] == settings
    client = (job / "site/config/config_fed_client.json").read_text()
    assert json.loads(client)["executors"][0]["executor"] == {"path": PARTS[1], "args": {}}
    assert not any(text in client + json.dumps(meta) for text in ("/srv/run", "night", "minimax"))


def test_a_job_that_could_not_run_is_refused(tmp_path: Path, site_table: Path) -> None:
    settings = {"method": "cycp-minimax", "out": "/srv/run", "sites": str(site_table)}
    with pytest.raises(ValueError, match="cycels"):
        write_job(tmp_path / "job", {**settings, "cycels": 3})
    with pytest.raises(ValueError, match="it must name the method"):
        write_job(tmp_path / "job", {"sites": str(site_table)})
    site_table.write_text('[north]\nkey = "ecdsa-sha2-nistp384 AAAA"\n')
    with pytest.raises(ValueError, match="NVFlare identifies a site by the name in its certificate: leave out key"):
        write_job(tmp_path / "job", settings)
    assert not (tmp_path / "job").exists()


def test_allowing_fedauc_adds_its_two_classes_and_takes_code_from_nobody(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "north")
    for _ in range(2):
        allow_fedauc(kit, {"data": "/data/rows.csv", "state": "/data/fedauc"})
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ["nvflare.x.Y", *PARTS]
    default = json.loads((kit / "local" / "resources.json.default").read_text())
    assert {**resources, "class_allow_list": default["class_allow_list"]} == default
    assert (kit / "local" / "fedauc.toml").read_text() == 'data = "/data/rows.csv"\nstate = "/data/fedauc"\n'
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    expected = {"view": "any", "byoc": "none", "shell_commands": "none"}
    assert rights == {"project_admin": expected, "lead": expected}
    with pytest.raises(ValueError, match="is no startup kit"):
        allow_fedauc(tmp_path)


def test_a_site_keeps_its_policy_when_its_rows_move(tmp_path: Path) -> None:
    """What is not given again stays: a policy above all. Paths may have any characters."""
    kit = make_kit(tmp_path / "north")
    allow_fedauc(kit, {"data": "/old/rows.csv", "state": "/data/fedauc", "policy": "/data/policy.toml"})
    allow_fedauc(kit, {"data": "/новое/\U0001f3e5.csv", "state": "/data/fedauc"})
    settings = tomllib.loads((kit / "local" / "fedauc.toml").read_text(encoding="utf-8"))
    assert settings == {
        "data": "/новое/\U0001f3e5.csv",
        "state": "/data/fedauc",
        "policy": "/data/policy.toml",
    }


def test_the_commands_write_the_files(
    tmp_path: Path, site_table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kit = make_kit(tmp_path / "kits" / "north")
    words = ("project", "project.yml", "--sites", "north,south", "--server", "fed.example.org", "--port", "9002")
    assert fedauc(capsys, "federation", "nvflare", *words, "--admin", "lead@example.org").code == 0
    project = (tmp_path / "project.yml").read_text()
    assert "{name: fed.example.org, type: server, org: fedauc, fed_learn_port: 9002}" in project
    assert "{name: south, type: client, org: fedauc}" in project
    assert (
        fedauc(capsys, "federation", "nvflare", "allow", str(kit), "--data", "rows.csv", "--state", "state").code == 0
    )
    assert f'data = "{tmp_path / "rows.csv"}"' in (kit / "local" / "fedauc.toml").read_text()
    words = (
        "job",
        "first",
        "--sites",
        str(site_table),
        "--out",
        "run",
        "--run-config",
        'method="cycp-pairwise" cycles=2',
    )
    assert fedauc(capsys, "federation", "nvflare", *words).code == 0
    server = json.loads((tmp_path / "first/coordinator/config/config_fed_server.json").read_text())
    settings = server["workflows"][0]["args"]["settings"]
    assert settings == {
        "method": "cycp-pairwise",
        "cycles": 2,
        "sites": str(site_table),
        "out": str(tmp_path / "run"),
    }
    refused = fedauc(capsys, "federation", "nvflare", "allow", str(kit), "--data", "rows.csv")
    assert refused.code == 2
    assert "a site needs --data and --state" in refused.err
