"""Whatever is done to the lines of an audit log is noticed, as far as a head that was noted elsewhere allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.federation.audit_log import FIRST, HEAD_FILE, LOG_FILE, AuditLog, read_entries, verify_log


def write_log(folder: Path, entries: int = 6) -> AuditLog:
    log = AuditLog(folder, lambda: "2026-01-01T00:00:00+00:00")
    for number in range(entries):
        log.append({"event": "message", "bytes_sent": 100 + number})
    return log


def test_an_untouched_log_is_intact(tmp_path: Path) -> None:
    write_log(tmp_path)
    report = verify_log(tmp_path)
    assert report.problem == ""
    assert report.head.entries == 6
    entries = read_entries(tmp_path)
    assert [entry["number"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert entries[0]["previous"] == FIRST
    for entry in entries:
        assert verify_log(tmp_path, entry["hash"]).problem == ""


TAMPERING: dict[str, Callable[[list[str]], list[str]]] = {
    "an edited value": lambda lines: [*lines[:2], lines[2].replace("102", "002"), *lines[3:]],
    "an edited last line": lambda lines: [*lines[:5], lines[5].replace("105", "005")],
    "a deletion in the middle": lambda lines: [*lines[:2], *lines[3:]],
    "a deleted first line": lambda lines: lines[1:],
    "two lines swapped": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "a repeated line": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "a shortened log": lambda lines: lines[:4],
    "an emptied log": lambda lines: [],
    "half a line": lambda lines: [*lines[:5], lines[5][:40]],
    "no JSON": lambda lines: [*lines[:2], "[" * 100_000, *lines[3:]],
}


@pytest.mark.parametrize("kind", TAMPERING)
def test_tampering_is_noticed(kind: str, tmp_path: Path) -> None:
    write_log(tmp_path)
    path = tmp_path / LOG_FILE
    lines = TAMPERING[kind](path.read_text().splitlines())
    ends = "" if kind == "half a line" else "\n"
    path.write_text("\n".join(lines) + (ends if lines else ""))
    assert verify_log(tmp_path).problem != ""


def test_a_missing_log_is_noticed(tmp_path: Path) -> None:
    write_log(tmp_path)
    (tmp_path / LOG_FILE).unlink()
    assert "missing" in verify_log(tmp_path).problem


def test_a_rewritten_history_is_noticed_by_a_noted_head(tmp_path: Path) -> None:
    """Whoever owns all files can write another chain with another head; only a hash noted elsewhere shows it."""
    write_log(tmp_path)
    noted = verify_log(tmp_path).head.hash
    (tmp_path / LOG_FILE).unlink()
    (tmp_path / HEAD_FILE).unlink()
    write_log(tmp_path, 4)
    assert verify_log(tmp_path).problem == ""
    assert "noted hash" in verify_log(tmp_path, noted).problem


def test_a_crash_between_the_line_and_its_head_is_no_damage(tmp_path: Path) -> None:
    log = write_log(tmp_path, 3)
    head = (tmp_path / HEAD_FILE).read_bytes()
    log.append({"event": "message"})
    (tmp_path / HEAD_FILE).write_bytes(head)
    assert verify_log(tmp_path).problem == ""
    log.append({"event": "message"})
    assert verify_log(tmp_path).head.entries == 5


def test_half_a_line_after_a_crash_is_set_aside_and_recorded(tmp_path: Path) -> None:
    log = write_log(tmp_path, 3)
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"number": 4, "eve')
    assert "line 4 is incomplete" in verify_log(tmp_path).problem
    log.append({"event": "message"})
    report = verify_log(tmp_path)
    assert report.problem == ""
    assert [entry["event"] for entry in read_entries(tmp_path)[3:]] == ["recovered", "message"]
    (torn,) = tmp_path.glob("audit-torn-*.txt")
    assert torn.read_text() == '{"number": 4, "eve'


def test_nothing_is_appended_to_a_damaged_log(tmp_path: Path) -> None:
    log = write_log(tmp_path, 3)
    path = tmp_path / LOG_FILE
    path.write_text(path.read_text().replace("101", "1"))
    with pytest.raises(ValueError, match=r"line 2 was changed.*start with another state folder"):
        log.append({"event": "message"})


@pytest.mark.parametrize("kind", ["a shortened log", "an emptied log"])
def test_the_next_line_does_not_hide_that_lines_were_removed(kind: str, tmp_path: Path) -> None:
    """A line is on the disk before its head, so that no crash leaves fewer lines than the head counts."""
    log = write_log(tmp_path)
    lines = TAMPERING[kind]((tmp_path / LOG_FILE).read_text().splitlines(keepends=True))
    (tmp_path / LOG_FILE).write_text("".join(lines))
    head = (tmp_path / HEAD_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"the log ends after line \d, but its head counts 6"):
        log.append({"event": "message"})
    assert (tmp_path / HEAD_FILE).read_bytes() == head
    assert verify_log(tmp_path).problem != ""


def test_the_next_line_does_not_hide_another_history_of_the_same_length(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    (tmp_path / "other").mkdir()
    other = AuditLog(tmp_path / "other", lambda: "another time, of another length")
    for _ in range(6):
        other.append({"event": "message"})
    (tmp_path / LOG_FILE).write_bytes((tmp_path / "other" / LOG_FILE).read_bytes())
    with pytest.raises(ValueError, match="its last line is not the one that its head names"):
        log.append({"event": "message"})


def test_the_head_of_an_empty_log_is_part_of_every_log(tmp_path: Path) -> None:
    assert verify_log(tmp_path, FIRST).problem == ""
    write_log(tmp_path)
    assert verify_log(tmp_path, FIRST).problem == ""


def test_processes_append_one_after_the_other(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fedauc.federation.audit_log import AuditLog\n"
        "for _ in range(10): AuditLog(Path(sys.argv[1])).append({'event': 'message'})"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=os.environ) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    report = verify_log(tmp_path)
    assert report.problem == ""
    assert report.head.entries == 20
    assert json.loads((tmp_path / HEAD_FILE).read_text())["entries"] == 20


@pytest.mark.parametrize("head", ["3f9a1c", "x" * 64, "A" * 64])
def test_a_head_that_is_no_hash_is_refused(head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The beginning of a hash would otherwise read as a log that was rewritten."""
    write_log(tmp_path)
    done = fedauc(capsys, "federation", "audit", str(tmp_path), "--head", head)
    assert done.code == 2
    assert "it must be the 64 characters that this command has printed" in done.err


def test_a_long_line_of_the_log_is_wrapped_in_a_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path, lambda: "2026-01-01T00:00:00+00:00")
    rule = "the policy allows no histograms of held-out scores"
    message = {"event": "message", "asked": "evaluation", "sent": "refusal", "round": 4, "bytes_sent": 1234}
    log.append({**message, "rule": rule})
    line = f"2026-01-01T00:00:00Z evaluation of round 5: refusal, 1,234 bytes ({rule})"
    assert len(line) > 100
    assert fedauc(capsys, "federation", "audit", str(tmp_path)).out.splitlines()[0] == line
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = fedauc(capsys, "federation", "audit", str(tmp_path)).out.splitlines()
    assert max(map(len, shown)) <= 80
    assert f"{shown[0]} {shown[1].strip()}" == line
