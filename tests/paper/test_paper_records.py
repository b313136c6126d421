"""Files of records and ranks that are not what was written: which one, what is wrong, and what to do."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import paper_command
from fedauc.experiments.config import Config
from paper.layout import Entry
from paper.records import Store, _commit, name
from paper.scales import SMOKE
from paper.tuning import Choice, Choices, Job
from paper_records import keep, labelled, scored

LABELS = labelled(40, 120)
CONFIG = SMOKE.config("cifar10", "cycp-fedavg", {})


def stored(folder: Path, config: Config = CONFIG) -> Store:
    """A folder with one run of two evaluated cycles, and 160 test rows."""
    store = Store(folder)
    keep(store, config, [0.6, 0.7], (LABELS, scored(LABELS, 1.0, 0)))
    return store


def record(folder: Path) -> Path:
    return folder / "runs" / f"{name(CONFIG)}.json"


def ranks(folder: Path) -> Path:
    return folder / "ranks" / f"{name(CONFIG)}.npz"


def changed(content: bytes, key: str, value: object) -> bytes:
    return json.dumps(json.loads(content) | {key: value}).encode()


Damage = Callable[[bytes], bytes]

RECORDS: dict[str, tuple[Damage, str]] = {
    "empty": (lambda whole: b"", "Expecting value"),
    "null": (lambda whole: b"null", "it is a NoneType, not an object"),
    "a list": (lambda whole: b"[1]", "it is a list, not an object"),
    "torn": (lambda whole: whole[:-20], "Expecting|Unterminated|delimiter"),
    "not UTF-8": (lambda whole: whole.replace(b"made up", b"\xff\xfe up"), "codec can't decode"),
    "not much": (lambda whole: b'{"format": 1}', "it lacks auc, average_precision, commit, config, curve"),
    "format": (lambda whole: changed(whole, "format", "1"), "format is '1'; it must be int"),
    "config": (lambda whole: changed(whole, "config", None), "config is a NoneType"),
    "method": (lambda whole: whole.replace(b'"cycp-fedavg"', b'"cycp-fed"'), "unknown method 'cycp-fed'"),
    "auc": (lambda whole: changed(whole, "auc", "high"), "auc is 'high'; it must be float"),
    "nan": (lambda whole: changed(whole, "auc", float("nan")), "auc is nan; it must be from 0 to 1"),
    "seconds": (lambda whole: changed(whole, "seconds", None), "seconds is None"),
    "versions": (lambda whole: changed(whole, "versions", "new"), "versions is 'new'; it must be dict"),
    "short point": (lambda whole: changed(whole, "curve", [[1, 10, 100, 0.5]]), "missing 1 required"),
    "point": (lambda whole: changed(whole, "curve", [[1, 10, 100, "x", 0.5]]), r"curve has \[1, 10, 100, 'x', 0.5\]"),
    "more": (lambda whole: changed(whole, "extra", 1), "it has an unknown extra"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_damaged_record_is_named_with_the_reason_and_the_remedy(tmp_path: Path, case: str) -> None:
    stored(tmp_path)
    path, (damage, reason) = record(tmp_path), RECORDS[case]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"^record {path} is damaged \(.*({reason}).*\); delete it, and its run is"):
        Store(tmp_path).get(CONFIG)


def test_a_record_of_a_later_version_is_not_to_be_deleted(tmp_path: Path) -> None:
    stored(tmp_path)
    path = record(tmp_path)
    path.write_bytes(changed(path.read_bytes(), "format", 99))
    with pytest.raises(ValueError, match=rf"^record {path} has a newer format than 1: upgrade fedauc$"):
        Store(tmp_path).get(CONFIG)


def archive(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def plain_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


RANKS: dict[str, Damage] = {
    "empty": lambda whole: b"",
    "torn": lambda whole: whole[:-30],
    "head": lambda whole: whole[:30],
    "text": lambda whole: b"ranks",
    "one array": lambda whole: plain_array(),
    "no ranks": lambda whole: archive(labels=np.zeros(2, np.uint8)),
    "no labels": lambda whole: archive(ranks=np.zeros(16, np.uint16)),
    "labels too short": lambda whole: archive(labels=np.zeros(1, np.uint8), ranks=np.zeros(16, np.uint16)),
    "labels of floats": lambda whole: archive(labels=np.zeros(2), ranks=np.zeros(16, np.uint16)),
    "ranks of floats": lambda whole: archive(labels=np.zeros(2, np.uint8), ranks=np.zeros(16)),
    "one rank": lambda whole: archive(labels=np.zeros(1, np.uint8), ranks=np.zeros((), np.uint16)),
}


@pytest.mark.parametrize("case", RANKS)
def test_damaged_ranks_are_named_with_the_remedy(tmp_path: Path, case: str) -> None:
    store, path = stored(tmp_path), ranks(tmp_path)
    path.write_bytes(RANKS[case](path.read_bytes()))
    remedy = f"delete it and {record(tmp_path)}, and the run is done again"
    with pytest.raises(ValueError, match=rf"^ranks file {path} is damaged \(.+\); {remedy}$"):
        store.ranks(CONFIG)


def test_one_wrong_byte_of_ranks_is_named_or_does_not_matter(tmp_path: Path) -> None:
    """Each byte turned over in its turn: no other error comes out, and no other ranks."""
    store, path = stored(tmp_path), ranks(tmp_path)
    whole, right = path.read_bytes(), store.ranks(CONFIG)
    assert right is not None
    errors: list[str] = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            found = store.ranks(CONFIG)
        except ValueError as error:
            errors.append(str(error))
            continue
        assert found is not None
        assert np.array_equal(found.ranks, right.ranks)
        assert np.array_equal(found.labels, right.labels)
    assert all(f"ranks file {path} is damaged" in error for error in errors)
    # Dates and attributes of the archive do not matter; the rest, more than half, does.
    assert len(errors) > len(whole) / 2


def test_a_report_over_empty_ranks_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not that it was interrupted: numpy's word for an empty file is that of a keyboard's end."""
    monkeypatch.setenv("FEDAUC_RESULTS", str(tmp_path))
    Choices(stored(tmp_path), SMOKE).put(Job("cifar10", Entry("cycp-fedavg", "cycp-fedavg")), Choice({}, "none", 0))
    ranks(tmp_path).write_bytes(b"")
    asked = ("--tables", "table1", "--scale", "smoke", "--seeds", "0", "--out", str(tmp_path / "page.md"))
    done = paper_command(capsys, "report", *asked)
    assert done.code == 2
    assert done.err.startswith(f"error: ranks file {ranks(tmp_path)} is damaged (No data left in file); delete it and")
    assert done.err.count("\n") == 1


def test_a_run_is_complete_with_its_record_and_the_ranks_it_needs(tmp_path: Path) -> None:
    store = stored(tmp_path)
    other = SMOKE.config("cifar10", "fedavg", {})
    assert store.complete(CONFIG, tested=True)
    assert not store.complete(other, tested=False)
    ranks(tmp_path).unlink()
    assert store.complete(CONFIG, tested=False)
    assert not store.complete(CONFIG, tested=True)


def test_a_commit_has_a_plus_where_the_source_has_changed_and_not_for_what_lies_beside_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    package, beside = tmp_path / "src" / "package", tmp_path / "results"
    package.mkdir(parents=True)
    beside.mkdir()
    for place in (package, beside):
        (place / "file").write_text("1")
    assert _commit(package) is None
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD")[:12]
    (beside / "file").unlink()
    assert _commit(package) == first
    (package / "other").write_text("2")
    assert _commit(package) == f"{first}+"
