"""`fedauc data`: which files are present, missing or wrong, and the class counts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import data_files
from cli_helpers import fedauc
from fedauc.cli import data as data_cli
from fedauc.data.datasets.chestmnist import ChestMNIST
from fedauc.data.datasets.cifar import Cifar10
from fedauc.data.datasets.medicare import LEIE, Medicare
from fedauc.data.io.stored import Source


def test_status_shows_what_is_present_and_where_to_get_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chestmnist(tmp_path, monkeypatch)
    result = fedauc(capsys, "data", "status", "--folder", str(tmp_path))
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == f"folder: {tmp_path}"
    assert any(line.startswith("chestmnist: present (") for line in lines)
    assert lines.count(data_cli.PRESENT) == 1
    assert "not checked" in data_cli.PRESENT
    assert "medicare: lacks 7 of 7 files" in lines
    assert "  UPDATED.csv  https://oig.hhs.gov/exclusions/downloadables/UPDATED.csv" in lines
    assert "  cifar-10-binary.tar.gz  https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in lines


def test_verify_names_the_wrong_file_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_cifar10(tmp_path, monkeypatch).load(0)
    where = ("--folder", str(tmp_path))
    right = fedauc(capsys, "data", "verify", "cifar10", *where)
    assert right.code == 0
    assert right.out.count("is right") == 7  # six files and the parsed folder
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    wrong = fedauc(capsys, "data", "verify", *where)
    assert wrong.code == 2
    assert f"cifar10: {path} is damaged or another file" in wrong.out


def test_verify_reads_what_has_no_checksum(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_medicare(tmp_path, monkeypatch)
    # The sample's years have 120 rows and its list 10 entries, fewer than the command line's defaults want.
    result = fedauc(capsys, "data", "verify", "medicare", "--folder", str(tmp_path))
    assert result.out.count("rows of the 50 states; it must have at least min_rows, 900000") == 6
    assert result.out.count("has 10 entries; it must have at least min_rows / 20, 45000") == 1
    assert len(result.out.splitlines()) == 7, "what is wrong with the whole is not said twice"
    assert result.code == 2
    assert Medicare().min_rows == 900_000


class Sample(Medicare):
    """The Medicare data, of which a hundred rows a year are enough."""

    def __init__(self, folder: str = "") -> None:
        super().__init__(folder=folder, min_rows=100)


def test_verify_notices_a_changed_file_without_a_checksum(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_cli, "find_datasets", lambda: {"medicare": Sample})
    data_files.make_medicare(tmp_path, monkeypatch)
    for _ in range(2):  # parsed by the first
        result = fedauc(capsys, "data", "verify", "medicare", "--folder", str(tmp_path))
        assert result.code == 0
        assert result.out.count("has no published checksum; its sha256:") == 7
    # The same size and time, so that the parsed folder is taken for its copy.
    path = tmp_path / "UPDATED.csv"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"20231115", b"20161115", 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = fedauc(capsys, "data", "verify", "medicare", "--folder", str(tmp_path))
    assert result.code == 2
    assert f"medicare: {path} is not what was parsed: its sha256:" in result.out
    assert result.out.count("is not what was parsed") == 1


YEAR = "MUP_PHY_R24_P07_V10_DY18_Prov.csv"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("UPDATED.csv", b"<html>log in</html>", "is a web page; delete it and fetch it again"),
        ("UPDATED.csv", b"NAME,NPI\n", "it is another table, or damaged; delete it and fetch it again"),
        (YEAR, b"", "is empty; delete it and fetch it again"),
    ],
)
def test_verify_names_a_wrong_file_where_others_are_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    result = fedauc(capsys, "data", "verify", "medicare", "--folder", str(tmp_path))
    assert result.code == 2
    absent, wrong = result.out.splitlines()
    assert "_D17_Prov.csv and 5 more in " in absent
    assert wrong.startswith(f"medicare: {tmp_path / name} ")
    assert wrong.endswith(why)


def test_verify_reads_each_file_to_its_end_where_others_are_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_cli, "find_datasets", lambda: {"medicare": Sample})
    data_files.make_medicare(tmp_path, monkeypatch)
    (tmp_path / YEAR.replace("DY18", "DY17")).unlink()
    where = ("data", "verify", "medicare", "--folder", str(tmp_path))
    right = fedauc(capsys, *where)
    assert right.code == 0
    assert right.out.count("has no published checksum; its sha256:") == 6
    for name in (YEAR, "UPDATED.csv"):
        # The last row ends in its first field.
        lines = (tmp_path / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join([*lines[:-1], lines[-1][:3]]))
    wrong = fedauc(capsys, *where)
    assert wrong.code == 2
    for name in (YEAR, "UPDATED.csv"):
        assert f"medicare: {tmp_path / name} is damaged" in wrong.out
    assert wrong.out.count("has no published checksum; its sha256:") == 4


def test_verify_checks_an_incomplete_folder_of_images(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_cifar10(tmp_path, monkeypatch)
    folder = tmp_path / "cifar-10-batches-bin"
    (folder / "test_batch.bin").unlink()
    result = fedauc(capsys, "data", "verify", "cifar10", "--folder", str(tmp_path))
    assert (result.code, result.out.count("is right")) == (0, 5)
    assert f"{folder} lacks test_batch.bin" in result.out
    status = fedauc(capsys, "data", "status", "cifar10", "--folder", str(tmp_path))
    assert f"  {folder} lacks test_batch.bin" in status.out.splitlines()
    (folder / "data_batch_2.bin").write_bytes(b"short")
    result = fedauc(capsys, "data", "verify", "cifar10", "--folder", str(tmp_path))
    assert (result.code, result.out.count("is right")) == (2, 4)
    assert f"cifar10: {folder / 'data_batch_2.bin'} is damaged or another file" in result.out


def test_an_empty_file_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    archive = tmp_path / "cifar-100-binary.tar.gz"
    archive.touch()
    result = fedauc(capsys, "data", "status", "cifar100", "--folder", str(tmp_path))
    assert result.code == 2
    assert f"cifar100: {archive} is empty; delete it and fetch it again" in result.out


@pytest.mark.parametrize("command", ["status", "verify", "fetch"])
def test_a_file_is_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    (file := tmp_path / "file").touch()
    result = fedauc(capsys, "data", command, "cifar10", "--folder", str(file))
    assert (result.code, result.err) == (2, f"error: folder is {file}, which is a file: name a folder\n")


@pytest.mark.parametrize(("names", "which"), [((), "any dataset"), (("medicare", "cifar10"), "medicare, cifar10")])
def test_verify_of_nothing_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: tuple[str, ...], which: str
) -> None:
    result = fedauc(capsys, "data", "verify", *names, "--folder", str(tmp_path))
    assert result.code == 1
    assert f"nothing to verify in {tmp_path}: no file of {which} is there" in result.out


def test_a_wrong_stand_in_is_not_called_published(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "nih_chest28.npz").write_bytes(b"short")
    result = fedauc(capsys, "data", "verify", "chest-stand-in", "--folder", str(tmp_path))
    assert result.code == 2
    assert "is that of the file this dataset was made from, not published; delete it, or put the" in result.out
    assert "published one" not in result.out
    assert "fetch" not in result.out


def test_stats_say_which_rows_only_stand_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chest_stand_in(tmp_path, monkeypatch)
    result = fedauc(capsys, "data", "stats", "chest-stand-in", "synthetic", "--folder", str(tmp_path))
    assert result.code == 0
    note = "`chest-stand-in` is not the paper's data: STAND-IN for ChestMNIST: 4,999 NIH chest X-rays, mass or none."
    assert result.out.splitlines()[-1] == note
    assert result.out.count("is not the paper's data") == 1


def test_one_bad_dataset_does_not_silence_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chestmnist(tmp_path, monkeypatch).load(0)
    for release in ("R24", "R25"):
        (tmp_path / f"MUP_PHY_{release}_P07_V10_D17_Prov.csv").touch()
    where = ("medicare", "chestmnist", "--folder", str(tmp_path))
    status, verified, counted = (fedauc(capsys, "data", command, *where) for command in ("status", "verify", "stats"))
    assert [status.code, verified.code, counted.code] == [2, 2, 2]
    assert "medicare: " in status.out
    for result in (status.out, verified.out, counted.err):
        assert "has 2 releases of 2017" in result
    assert "chestmnist: present (" in status.out
    assert "chestmnist.npz is right" in verified.out
    assert "chestmnist" in counted.out


def test_verify_lists_broken_folders_and_only_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chest_stand_in(tmp_path, monkeypatch).load(0)
    (folder,) = (tmp_path / "parsed").iterdir()
    (folder / "manifest.json").unlink()
    result = fedauc(capsys, "data", "verify", "chest-stand-in", "--folder", str(tmp_path))
    assert result.code == 2
    assert f"{folder / 'manifest.json'} is damaged: delete the folder {folder}" in result.out
    # The name of another dataset may begin like this one's.
    monkeypatch.setattr(ChestMNIST, "name", "chest")
    monkeypatch.setattr(data_cli, "find_datasets", lambda: {"chest": ChestMNIST})
    result = fedauc(capsys, "data", "verify", "chest", "--folder", str(tmp_path))
    assert result.code == 1  # nothing of it is there
    assert "manifest" not in result.out


def test_stats_say_what_a_table_needs(capsys: pytest.CaptureFixture[str]) -> None:
    result = fedauc(capsys, "data", "stats", "table", "synthetic")
    assert result.code == 2
    assert result.err == (
        "error: table has no counts of its own: it needs path; use `fedauc run --data table --data.path ...`\n"
    )
    assert "synthetic" in result.out


def test_a_login_page_is_not_fetched_for_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_medicare(tmp_path, monkeypatch)
    (tmp_path / "served").mkdir()
    right = tmp_path / "served" / "UPDATED.csv"
    (tmp_path / "UPDATED.csv").rename(right)
    content = right.read_bytes()
    with serve_folder(tmp_path / "served") as address:
        source = LEIE._replace(url=f"{address}/UPDATED.csv")
        monkeypatch.setattr(Medicare, "sources", (*Medicare.sources[:-1], source))
        for wrong, why in ((b"<html>log in</html>", "it is a web page"), (b"NAME,NPI\n", "it lacks the columns")):
            right.write_bytes(wrong)
            result = fedauc(capsys, "data", "fetch", "medicare", "--folder", str(tmp_path))
            assert result.code == 2
            assert f"sent another file than UPDATED.csv: {why}" in result.err
            assert not (tmp_path / "UPDATED.csv").exists()
        right.write_bytes(content)
        result = fedauc(capsys, "data", "fetch", "medicare", "--folder", str(tmp_path))
    assert result.code == 0
    none = "7 of its files have no published checksum; run `fedauc data verify medicare`"
    assert result.out == f"medicare: fetched, not verified: {none}\n"


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """The address of a server of a folder's files."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def test_fetch_downloads_what_is_missing_and_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chestmnist(tmp_path, monkeypatch)
    result = fedauc(capsys, "data", "fetch", "chestmnist", "--folder", str(tmp_path))
    assert (result.code, result.out) == (0, "chestmnist: complete\n")
    (tmp_path / "chestmnist.npz").unlink()
    # Port 9 (discard) is served by nobody here.
    source = ChestMNIST.sources[0]._replace(url="http://127.0.0.1:9/chestmnist.npz")
    monkeypatch.setattr(ChestMNIST, "sources", (source,))
    result = fedauc(capsys, "data", "fetch", "chestmnist", "--folder", str(tmp_path))
    assert result.code == 2
    assert "error: http://127.0.0.1:9/chestmnist.npz cannot be reached" in result.err


def test_fetch_refuses_a_wrong_file_that_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chestmnist(tmp_path, monkeypatch)
    wrong = Source("chestmnist.npz", "https://example.org/", "md5:0", "")
    monkeypatch.setattr(ChestMNIST, "sources", (wrong,))
    result = fedauc(capsys, "data", "fetch", "chestmnist", "--folder", str(tmp_path))
    assert result.code == 2
    assert "chestmnist.npz is damaged or another file" in result.err


def test_stats_count_after_the_papers_removal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chestmnist(tmp_path, monkeypatch)
    result = fedauc(capsys, "data", "stats", "chestmnist", "synthetic", "--folder", str(tmp_path))
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines()]
    # 6 of 60 have a mass, half of them are removed: 3 of 57 is 5.26 %.
    assert ["chestmnist", "train", "3", "54", "5.26", "1,994", "/", "74,480"] in rows
    assert ["synthetic", "train", "200", "1,800", "10.00", "-"] in rows


def test_stats_of_everything_skip_what_is_missing_aloud(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = fedauc(capsys, "data", "stats", "--folder", str(tmp_path))
    assert result.code == 0
    for name in ("cifar10", "cifar100", "chestmnist", "medicare"):
        assert f"{name} needs " in result.out
    named = fedauc(capsys, "data", "stats", "cifar10", "--folder", str(tmp_path))
    assert named.code == 2
    assert "cifar10 needs cifar-10-binary.tar.gz" in named.err


@pytest.mark.parametrize("command", ["status", "fetch", "verify", "stats"])
def test_unknown_datasets_have_a_hint(capsys: pytest.CaptureFixture[str], command: str) -> None:
    result = fedauc(capsys, "data", command, "cifar-10")
    assert result.code == 2
    assert "did you mean 'cifar10" in result.err


@pytest.mark.parametrize("command", ["status", "fetch", "verify", "stats"])
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    helped = fedauc(capsys, "data", command, "--help")
    assert helped.code == 0
    assert f"Example: fedauc data {command}" in " ".join(helped.out.split())


def test_a_run_takes_images_from_the_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_cifar10(tmp_path / "data", monkeypatch)
    monkeypatch.setenv("FEDAUC_DATA", str(tmp_path / "data"))
    chosen = ("--data", "cifar10", "--data.positive", "cat", "--data.validation-rows", "20")
    parts = ("--data.validation-positives", "4", "--partition", "dirichlet", "--partition.clients", "4")
    short = ("--model", "small-cnn", "--groups", "2", "--cycles", "2", "--local-steps", "1")
    ran = fedauc(capsys, "run", *chosen, *parts, *short, "--out", str(tmp_path / "run"))
    assert ran.code == 0, ran.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"].startswith("cifar10, 'cat' against the rest; 180 of 180 training rows, 16 labelled positive")
    assert "validation_auc" in result["final"]
    assert Cifar10().home_folder == tmp_path / "data"


def test_describe_says_what_a_run_would_make_of_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "claims.csv")
    assert fedauc(capsys, "data", "example", path, "--rows", "400").code == 0
    words = ("data", "describe", path, "--label", "fraud", "--client", "state")
    asked = fedauc(capsys, *words)
    assert asked.code == 2
    assert "say which one is positive, usually the rarer: use --data.positive yes" in asked.err
    shown = fedauc(capsys, *words, "--positive", "yes")
    assert "280 train rows" in shown.out
    assert "label 'yes' is positive" in shown.out
    described = json.loads(fedauc(capsys, *words, "--positive", "yes", "--json").out)
    assert described["rows"] == {"train": 280, "test": 120}
    assert described["ignored"] != {}
