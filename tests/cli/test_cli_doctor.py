"""`fedauc doctor`: what it finds in this environment, and what it says of a broken one."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.cli import doctor


def test_a_sound_installation_has_no_broken_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    outcome = fedauc(capsys, "doctor", "--folder", str(tmp_path))
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert outcome.code == 0, outcome.out
    assert not [line for line in lines if line.startswith("broken")]
    assert any(line.startswith("ok torch 2.") for line in lines)
    assert any(line.startswith("ok training 15 rounds in ") for line in lines)
    assert lines[-1] == "Everything that training needs is here."
    assert list(tmp_path.iterdir()) == []


def test_what_is_broken_is_named_and_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAUC_PLUGINS", "no_such_module")
    monkeypatch.setattr(doctor, "check_training", lambda: iter(()))
    outcome = fedauc(capsys, "doctor", "--folder", "/proc/runs")
    text = " ".join(outcome.out.split())
    assert outcome.code == 1
    assert outcome.err.endswith("checks failed\n")
    assert "broken folder of runs /proc/runs/run cannot be written" in text
    assert "broken plug-in no_such_module there is no plug-in module 'no_such_module' here" in text


def test_a_missing_extra_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "torch<2.14,>=2.11",
        'numpy>=2; extra == "here"',
        'fedauc[here]; extra == "elsewhere"',
        'no-such-package<3,>=2; extra == "elsewhere"',
        'ruff>=0.11; extra == "dev"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda package: wanted)
    here, elsewhere = doctor.check_extras()
    assert here == ("extra here", "ok", f"numpy {importlib.metadata.version('numpy')}")
    assert elsewhere == ("extra elsewhere", "optional", "pip install 'no-such-package<3,>=2'")


def test_every_extra_for_users_has_a_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = importlib.metadata.metadata("fedauc").get_all("Provides-Extra") or []
    assert set(doctor.PURPOSES) == set(extras) - set(doctor.INTERNAL_EXTRAS)
    monkeypatch.setattr(doctor, "requires", lambda package: ['no-such-package; extra == "tune"'])
    assert [finding.text for finding in doctor.check_extras()] == ["for fedauc tune: pip install 'no-such-package'"]


def test_a_version_that_does_not_fit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: "1.9.0")
    found = {finding.topic: finding for finding in doctor.check_versions()}
    assert found["torch"] == ("torch", "broken", "1.9.0; it must be 2.11 or later, below 2.14")
    assert found["numpy"].status == "broken"


def test_a_full_disk_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "LEAST_FREE", 10**18)
    runs, _ = doctor.check_disk(tmp_path)
    assert runs.status == "broken"
    assert runs.text.endswith("runs need about 1e+06 TB: free some")


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "check_devices", fail)
    monkeypatch.setattr(doctor, "check_training", lambda: iter(()))
    found = {finding.topic: finding for finding in doctor.examine_installation(tmp_path)}
    assert found["devices"].status == "broken"
    assert "RuntimeError: no driver" in found["devices"].text
    assert "folder of runs" in found
