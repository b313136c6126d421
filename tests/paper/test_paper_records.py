"""Files of records and ranks: what they hold, and what is said of those that are damaged."""

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
from paper.records import COMMIT_VARIABLE, RecordStore, changed_fields, find_source_commit, read_changes, run_name
from paper.scales import PAPER, SMOKE
from paper.table_specs import METHODS, Row
from paper.tuning import ChoiceStore, TuningChoice, TuningJob
from paper_records import keep, labelled, scored

LABELS = labelled(40, 120)
CONFIG = SMOKE.build_config("cifar10", "cycp-fedavg", {})


def stored(folder: Path, config: Config = CONFIG) -> RecordStore:
    """A folder with one run of two evaluated cycles, and 160 test rows."""
    store = RecordStore(folder)
    keep(store, config, [0.6, 0.7], (LABELS, scored(LABELS, 1.0, 0)))
    return store


def lines_path(folder: Path) -> Path:
    return folder / "synthetic.jsonl"


def ranks_path(folder: Path) -> Path:
    return folder / "synthetic-ranks.npz"


def with_field(line: bytes, key: str, value: object) -> bytes:
    return json.dumps(json.loads(line) | {key: value}).encode()


Damage = Callable[[bytes], bytes]

RECORDS: dict[str, tuple[Damage, str]] = {
    "null": (lambda line: b"null", "it is a NoneType, not an object"),
    "a list": (lambda line: b"[1]", "it is a list, not an object"),
    "torn": (lambda line: line[:-20], "Expecting|Unterminated|delimiter"),
    "not UTF-8": (lambda line: line.replace(b"made up", b"\xff\xfe up"), "codec can't decode"),
    "not much": (lambda line: b'{"format": 1}', "it lacks auc, average_precision, commit, config, curve"),
    "no format": (lambda line: b"{}", "it lacks format"),
    "format": (lambda line: with_field(line, "format", "1"), "format is '1'; it must be int"),
    "config": (lambda line: with_field(line, "config", None), "config is a NoneType"),
    "method": (lambda line: line.replace(b'"cycp-fedavg"', b'"cycp-fed"'), "unknown method 'cycp-fed'"),
    "auc": (lambda line: with_field(line, "auc", "high"), "auc is 'high'; it must be float"),
    "nan": (lambda line: with_field(line, "auc", float("nan")), "auc is nan; it must be from 0 to 1"),
    "seconds": (lambda line: with_field(line, "seconds", None), "seconds is None"),
    "versions": (lambda line: with_field(line, "versions", "new"), "versions is 'new'; it must be dict"),
    "short point": (lambda line: with_field(line, "curve", [[1, 10, 100, 0.5]]), "missing 1 required"),
    "point": (
        lambda line: with_field(line, "curve", [[1, 10, 100, "x", 0.5]]),
        r"curve has \[1, 10, 100, 'x', 0.5\]",
    ),
    "more": (lambda line: with_field(line, "extra", 1), "it has an unknown extra"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_damaged_record_is_named_with_the_reason_and_the_remedy(tmp_path: Path, case: str) -> None:
    stored(tmp_path)
    path, (damage, reason) = lines_path(tmp_path), RECORDS[case]
    line = path.read_bytes()
    path.write_bytes(line + damage(line.rstrip()) + b"\n")
    remedy = "delete that line, and what it records is done again"
    with pytest.raises(ValueError, match=rf"^line 2 of {path} is damaged \(.*({reason}).*\); {remedy}$"):
        RecordStore(tmp_path).find_record(CONFIG)


def test_a_record_of_a_later_version_is_not_to_be_deleted(tmp_path: Path) -> None:
    stored(tmp_path)
    path = lines_path(tmp_path)
    path.write_bytes(with_field(path.read_bytes(), "format", 99))
    with pytest.raises(ValueError, match=rf"^line 1 of {path} has a newer format than 1: upgrade fedauc$"):
        RecordStore(tmp_path).find_record(CONFIG)


@pytest.mark.parametrize("end", ["torn", "without a newline", "empty line"])
def test_a_crash_while_a_line_is_written_loses_that_line_alone(tmp_path: Path, end: str) -> None:
    """Wherever the second of two lines is cut off, the first is read, and a third has a line of its own."""
    other, third = (SMOKE.build_config("cifar10", method, {}) for method in ("fedavg", "scaffold"))
    for config in (CONFIG, other):
        stored(tmp_path, config)
    path = lines_path(tmp_path)
    whole = path.read_bytes()
    cuts = {"torn": range(whole.index(b"\n") + 2, len(whole) - 1, 97), "without a newline": [len(whole) - 1]}
    for cut in cuts.get(end, [len(whole)]):
        path.write_bytes(whole[:cut] + b"\n" * (end == "empty line"))
        store = RecordStore(tmp_path)
        assert store.find_record(CONFIG) is not None
        assert (store.find_record(other) is None) == (end == "torn")
        stored(tmp_path, third)
        again = RecordStore(tmp_path)
        assert [again.find_record(config) is not None for config in (CONFIG, other, third)] == [
            True,
            end != "torn",
            True,
        ]


def test_the_last_record_of_a_configuration_counts(tmp_path: Path) -> None:
    for auc in (0.6, 0.7):
        keep(RecordStore(tmp_path), CONFIG, [auc], (LABELS, scored(LABELS, auc, 0)))
    store = RecordStore(tmp_path)
    record, ranks = store.find_record(CONFIG), store.load_ranks(CONFIG)
    assert record is not None
    assert ranks is not None
    assert record.auc == 0.7
    assert np.array_equal(ranks.ranks, np.unique(scored(LABELS, 0.7, 0), return_inverse=True)[1])


def test_a_line_has_only_the_fields_that_differ_from_the_defaults(tmp_path: Path) -> None:
    """So that a new field, which older lines do not have, finds them at its default."""
    stored(tmp_path)
    line = json.loads(lines_path(tmp_path).read_text())
    assert line["config"]["recipe"]["method"] == "cycp-fedavg"
    assert line["config"]["data"]["name"] == "synthetic"
    assert "learning_rate" not in line["config"]["recipe"]
    assert "seed" not in line["config"]["recipe"]


@pytest.mark.parametrize("method", METHODS)
def test_the_changed_fields_of_every_run_give_back_its_configuration(method: str) -> None:
    for scale in (PAPER, SMOKE):
        for dataset in scale.datasets:
            config = scale.build_config(dataset, method, {"learning-rate": "0.07", "seed": "3"})
            assert read_changes(json.loads(changed_fields(config))) == config


def test_runs_on_the_same_test_rows_share_their_labels(tmp_path: Path) -> None:
    for seed in range(3):
        stored(tmp_path, SMOKE.build_config("cifar10", "cycp-fedavg", {"seed": str(seed)}))
    with np.load(ranks_path(tmp_path)) as archive:
        assert len(archive.files) == 4
        assert sum(name.startswith("labels/") for name in archive.files) == 1


def archive(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def plain_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


def entries(**arrays: np.ndarray) -> bytes:
    """An archive with the labels and ranks of the stored run, as far as they are given."""
    names = {"labels": "labels/0", "ranks": f"0/{run_name(CONFIG)}"}
    return archive(**{names[kind]: array for kind, array in arrays.items()})


RANKS: dict[str, Damage] = {
    "empty": lambda whole: b"",
    "torn": lambda whole: whole[:-30],
    "head": lambda whole: whole[:30],
    "text": lambda whole: b"ranks",
    "one array": lambda whole: plain_array(),
    "no labels": lambda whole: entries(ranks=np.zeros(16, np.uint16)),
    "labels too short": lambda whole: entries(labels=np.zeros(1, np.uint8), ranks=np.zeros(16, np.uint16)),
    "labels of floats": lambda whole: entries(labels=np.zeros(2), ranks=np.zeros(16, np.uint16)),
    "ranks of floats": lambda whole: entries(labels=np.zeros(2, np.uint8), ranks=np.zeros(16)),
    "one rank": lambda whole: entries(labels=np.zeros(1, np.uint8), ranks=np.zeros((), np.uint16)),
}


@pytest.mark.parametrize("case", RANKS)
def test_damaged_ranks_are_named_with_the_remedy(tmp_path: Path, case: str) -> None:
    stored(tmp_path)
    path = ranks_path(tmp_path)
    path.write_bytes(RANKS[case](path.read_bytes()))
    remedy = "restore it, or delete it, and the runs on synthetic that a table tests are done again"
    with pytest.raises(ValueError, match=rf"^ranks file {path} is damaged \(.+\); {remedy}$"):
        RecordStore(tmp_path).load_ranks(CONFIG)


def test_one_wrong_byte_of_ranks_is_named_or_does_not_matter(tmp_path: Path) -> None:
    """Each byte is inverted in turn: no other error comes out, and no other ranks."""
    path, right = ranks_path(tmp_path), stored(tmp_path).load_ranks(CONFIG)
    whole = path.read_bytes()
    assert right is not None
    errors: list[str] = []
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            ranks = RecordStore(tmp_path).load_ranks(CONFIG)
        except ValueError as error:
            errors.append(str(error))
            continue
        assert ranks is not None
        assert np.array_equal(ranks.ranks, right.ranks)
        assert np.array_equal(ranks.labels, right.labels)
    assert all(f"ranks file {path} is damaged" in error for error in errors)
    # Dates and attributes of the archive do not matter; the rest, more than half, does.
    assert len(errors) > len(whole) / 2


def test_a_report_over_empty_ranks_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not that it was interrupted: numpy's word for an empty file is that of a keyboard's end."""
    monkeypatch.setenv("FEDAUC_RECORDS", str(tmp_path))
    ChoiceStore(stored(tmp_path), SMOKE).add_choice(
        TuningJob("cifar10", Row("cycp-fedavg", "cycp-fedavg")), TuningChoice({}, "none", 0)
    )
    ranks_path(tmp_path).write_bytes(b"")
    asked = ("--tables", "table1", "--scale", "smoke", "--seeds", "0", "--out", str(tmp_path / "page.md"))
    done = paper_command(capsys, "report", *asked)
    assert done.code == 2
    assert done.err.startswith(f"error: ranks file {ranks_path(tmp_path)} is damaged (No data left in file); restore")
    assert done.err.count("\n") == 1


def test_a_run_is_complete_with_its_record_and_the_ranks_it_needs(tmp_path: Path) -> None:
    store = stored(tmp_path)
    other = SMOKE.build_config("cifar10", "fedavg", {})
    assert store.is_complete(CONFIG, tested=True)
    assert not store.is_complete(other, tested=False)
    ranks_path(tmp_path).unlink()
    store = RecordStore(tmp_path)
    assert store.is_complete(CONFIG, tested=False)
    assert not store.is_complete(CONFIG, tested=True)


def test_a_source_commit_has_a_plus_where_the_source_has_changed_and_not_for_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    package, beside = tmp_path / "src" / "package", tmp_path / "records"
    package.mkdir(parents=True)
    beside.mkdir()
    for place in (package, beside):
        (place / "file").write_text("1")
    assert find_source_commit(package) is None
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD")[:12]
    # A repository knows its commit better than the environment.
    monkeypatch.setenv(COMMIT_VARIABLE, "0" * 40)
    (beside / "file").unlink()
    assert find_source_commit(package) == first
    (package / "other").write_text("2")
    assert find_source_commit(package) == f"{first}+"


def test_a_copy_without_a_repository_has_the_commit_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv(COMMIT_VARIABLE, commit)
    assert find_source_commit(tmp_path) == commit[:12]
    monkeypatch.setenv(COMMIT_VARIABLE, f"{commit}+")
    assert find_source_commit(tmp_path) == f"{commit[:12]}+"
    monkeypatch.setenv(COMMIT_VARIABLE, "latest")
    with pytest.raises(ValueError, match="FEDAUC_COMMIT is 'latest'; it must be 12 to 40 hexadecimal digits"):
        find_source_commit(tmp_path)


def test_merge_adds_runs_ranks_and_choices_of_another_folder_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that both folders have keeps the record of the folder that is merged into; its newer choice is taken."""
    here, there = tmp_path / "here", tmp_path / "there"
    new = SMOKE.build_config("cifar10", "scaffold", {})
    keep(RecordStore(here), CONFIG, [0.6], (LABELS, scored(LABELS, 0.6, 0)))
    keep(RecordStore(there), CONFIG, [0.9], (LABELS, scored(LABELS, 0.9, 0)))
    keep(RecordStore(there), new, [0.8], (LABELS, scored(LABELS, 0.8, 1)))
    job = TuningJob("cifar10", Row.parse("a=cycp-fedavg"))
    earlier, later = (TuningChoice({"learning-rate": rate}, "steps", 120) for rate in ("0.1", "0.01"))
    for folder in (here, there):
        ChoiceStore(RecordStore(folder), SMOKE).add_choice(job, earlier)
    ChoiceStore(RecordStore(there), SMOKE).add_choice(job, later)
    monkeypatch.setenv("FEDAUC_RECORDS", str(here))

    done = paper_command(capsys, "merge", str(there))
    assert (done.code, done.out) == (0, f"added 1 runs and 1 choices of settings from {there}\n")
    merged = RecordStore(here)
    kept_record, new_record = merged.find_record(CONFIG), merged.find_record(new)
    assert kept_record is not None
    assert new_record is not None
    assert (kept_record.auc, new_record) == (0.6, RecordStore(there).find_record(new))
    ranks, source_ranks = merged.load_ranks(new), RecordStore(there).load_ranks(new)
    assert ranks is not None
    assert source_ranks is not None
    assert np.array_equal(ranks.ranks, source_ranks.ranks)
    assert np.array_equal(ranks.labels, source_ranks.labels)
    choice = ChoiceStore(merged, SMOKE).find_choice(job)
    assert choice is not None
    assert choice.settings == later.settings

    files = {path.name: path.read_bytes() for path in here.iterdir()}
    assert paper_command(capsys, "merge", str(there)).out == f"added 0 runs and 0 choices of settings from {there}\n"
    assert {path.name: path.read_bytes() for path in here.iterdir()} == files


def test_merge_refuses_a_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = paper_command(capsys, "merge", str(tmp_path))
    assert done.code == 2
    assert f"{tmp_path} has no records" in done.err
