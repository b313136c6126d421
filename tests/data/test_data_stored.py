"""Datasets in files: what is missing, damaged or changed is named and never used; parsing happens once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import data_files
from fedauc.data import Preparation, prepare_table
from fedauc.data.datasets.chestmnist import ChestMNIST
from fedauc.data.datasets.cifar import Cifar10
from fedauc.data.io.stored import (
    File,
    Source,
    check_file,
    file_digest,
    files_fingerprint,
    load_or_build,
    recorded_sources,
    resolve_folder,
)
from fedauc.data.partitions import Dirichlet
from fedauc.locks import hold_lock


def build(into: Path) -> dict[str, int]:
    np.save(into / "numbers.npy", np.arange(1000))
    return {"rows": 1000}


def test_the_folder_is_the_option_then_the_variable_then_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUC_DATA", "/somewhere")
    assert resolve_folder("/here") == Path("/here")
    assert resolve_folder("") == Path("/somewhere")
    monkeypatch.delenv("FEDAUC_DATA")
    monkeypatch.setenv("HOME", "/users/me")
    assert resolve_folder("") == Path("/users/me/.cache/fedauc")
    monkeypatch.setenv("FEDAUC_DATA", "~/data")
    assert resolve_folder("") == Path("/users/me/data")
    assert resolve_folder("~/other") == Path("/users/me/other")


def test_where_nothing_can_be_written_arrays_go_to_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays next to the files are still read there. The superuser may write everywhere, so os.access is replaced."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    shared = tmp_path / "shared"
    shared.mkdir()
    data = data_files.make_cifar10(shared, monkeypatch)
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    with monkeypatch.context() as sealed:
        sealed.setattr("fedauc.data.io.stored.os.access", access)
        data.load(0)
        assert set(asked) == {(shared, os.W_OK)}
        (cached,) = (tmp_path / "me" / ".cache" / "fedauc" / "parsed").iterdir()
        assert data.parsed_folder() == cached
        assert not (shared / "parsed").exists()
    data.load(0)
    with monkeypatch.context() as sealed:
        sealed.setattr("fedauc.data.io.stored.os.access", access)
        assert data.parsed_folder() == shared / "parsed" / cached.name


def test_parsing_happens_once_and_arrays_are_mapped(tmp_path: Path) -> None:
    calls = []

    def counted(into: Path) -> dict[str, int]:
        calls.append(into)
        return build(into)

    for _ in range(2):
        arrays, counts = load_or_build(tmp_path, "name", counted)
        assert isinstance(arrays["numbers"], np.memmap)
        assert not arrays["numbers"].flags.writeable
        assert counts == {"rows": 1000}
    assert len(calls) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_parse_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(into: Path) -> dict[str, int]:
        build(into)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        load_or_build(tmp_path, "name", fails)
    assert list(tmp_path.iterdir()) == []
    assert load_or_build(tmp_path, "name", build).counts == {"rows": 1000}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_parsed_array_is_named_and_not_used(tmp_path: Path, damage: str) -> None:
    load_or_build(tmp_path, "name", build)
    path = tmp_path / "name" / "numbers.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content if damage == "flip" else content[:-8])
    with pytest.raises(ValueError, match=r"numbers\.npy is damaged: delete the folder .*name, it will be made again"):
        load_or_build(tmp_path, "name", build)


@pytest.mark.parametrize("content", [None, "no json", "[]", "{}", '{"arrays": {}, "counts": {}}', '{"arrays": [1]}'])
def test_a_damaged_manifest_is_named_and_the_folder_not_used(tmp_path: Path, content: str | None) -> None:
    load_or_build(tmp_path, "name", build)
    path = tmp_path / "name" / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    (tmp_path / "name" / "numbers.npy").unlink()

    def refuse(into: Path) -> dict[str, int]:
        raise AssertionError("parsed again, for a folder that is there")

    with pytest.raises(ValueError, match=r"manifest\.json is damaged: delete the folder .*name, it will be made again"):
        load_or_build(tmp_path, "name", refuse)
    shutil.rmtree(tmp_path / "name")
    assert load_or_build(tmp_path, "name", build).counts == {"rows": 1000}


def test_an_array_that_the_manifest_does_not_list_is_damage(tmp_path: Path) -> None:
    load_or_build(tmp_path, "name", build)
    np.save(tmp_path / "name" / "more.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        load_or_build(tmp_path, "name", build)


def test_what_cannot_be_put_in_place_is_no_success(tmp_path: Path) -> None:
    # Nothing can be renamed to a link, and this one leads nowhere.
    (tmp_path / "name").symlink_to("nowhere")
    with pytest.raises(NotADirectoryError):
        load_or_build(tmp_path, "name", build)
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


STUCK = """
import sys, time
from pathlib import Path
from fedauc.data.io.stored import load_or_build

def build(into):
    (into / "numbers.npy").write_bytes(b"half of it")
    time.sleep(600)

load_or_build(Path(sys.argv[1]), "name", build)
"""


def test_what_a_killed_parse_left_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)]) as process:
        try:
            end = time.monotonic() + 60  # importing the library takes seconds
            while not list(tmp_path.rglob("numbers.npy")):
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            (half,) = tmp_path.rglob("numbers.npy")
            load_or_build(tmp_path, "second", build)
            assert half.read_bytes() == b"half of it"
        finally:
            process.kill()
    assert half.exists()
    load_or_build(tmp_path, "third", build)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "third"]


def test_a_look_at_a_lock_does_not_stop_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that sweeps holds a new part's lock for a moment, here .3 s, before its owner has it."""
    known = uuid.UUID(int=1)
    monkeypatch.setattr("fedauc.data.io.stored.uuid.uuid4", lambda: known)
    monkeypatch.setattr("fedauc.data.io.stored._remove_abandoned", lambda home: None)
    held = threading.Event()

    def look() -> None:
        with hold_lock(tmp_path / f".part-{known.hex}.lock", "held"):
            held.set()
            time.sleep(0.3)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        assert held.wait(10)
        assert load_or_build(tmp_path, "name", build).counts == {"rows": 1000}
        looking.result()


def test_several_may_parse_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=30)

    def slow(into: Path) -> dict[str, int]:
        together.wait()
        return build(into)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load_or_build(tmp_path, "name", slow), range(4)))
    assert [parsed.counts for parsed in results] == [{"rows": 1000}] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_checksum_is_compared_whatever_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # The digests of "abc" in RFC 1321 and FIPS 180.
    check_file(File(path, "md5:900150983cd24fb0d6963f7d28e17f72"))
    check_file(File(path, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"))
    check_file(File(path, ""))
    with pytest.raises(
        ValueError, match=r"file is damaged or another file: its md5:9001.*, but md5:0 is the published"
    ):
        check_file(File(path, "md5:0"))
    assert file_digest(path, "md5") == "md5:900150983cd24fb0d6963f7d28e17f72"


def test_a_fingerprint_goes_by_the_checksum_else_by_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    os.utime(path, ns=(0, 1))
    published, unknown = files_fingerprint((File(path, "md5:1"),), ""), files_fingerprint((File(path, ""),), "")
    assert files_fingerprint((File(path, ""),), "") == unknown
    assert files_fingerprint((File(path, ""),), "another key") != unknown
    # The same size: only the time tells.
    path.write_bytes(b"abd")
    os.utime(path, ns=(0, 2))
    assert files_fingerprint((File(path, ""),), "") != unknown
    assert files_fingerprint((File(path, "md5:1"),), "") == published
    # The same time: only the size tells.
    path.write_bytes(b"abcd")
    os.utime(path, ns=(0, 1))
    assert files_fingerprint((File(path, ""),), "") != unknown


def test_the_checksums_of_the_sources_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    dataset.load(0)
    assert recorded_sources(dataset.parsed_folder()) == {
        path.name: file_digest(path) for path in tmp_path.glob("*.csv")
    }


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"<!DOCTYPE html><title>Log in</title>", "is a web page"),
        (b"\xef\xbb\xbf\r\n <HTML>", "is a web page"),
        (b"", "is empty"),
        (b"NPI,EXCLTYPE\n", ""),
    ],
)
def test_a_web_page_does_not_look_right(tmp_path: Path, content: bytes, wrong: str) -> None:
    (tmp_path / "file").write_bytes(content)
    dataset = ChestMNIST(folder=str(tmp_path))
    with pytest.raises(ValueError, match=f"file {wrong}") if wrong else nullcontext():
        dataset.check_download(dataset.sources[0], tmp_path / "file")


def test_a_missing_file_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar10 needs cifar-10-binary\.tar\.gz in .*`fedauc data fetch cifar10`"):
        Cifar10(folder=str(tmp_path)).load(0)


def test_a_damaged_file_is_named_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_cifar10(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is damaged or another file"):
        dataset.load(0)
    content[100] ^= 1
    path.write_bytes(content)
    assert dataset.load(0).note


def test_official_addresses_and_checksums_are_well_formed() -> None:
    from fedauc.data import find_datasets
    from fedauc.data.io.stored import StoredDataset

    sources: list[Source] = []
    for kind in find_datasets().values():
        if issubclass(kind, StoredDataset):
            sources += kind.sources
    assert len(sources) == 12  # CIFAR 2, chests 1, cards 1, Medicare 7, stand-in 1
    for source in sources:
        algorithm, _, value = source.checksum.partition(":")
        assert len(value) == {"md5": 32, "sha256": 64, "": 0}[algorithm]
        assert source.url.startswith("https://") or "not published" in source.page


def test_mapped_images_reach_the_clients_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = data_files.make_chestmnist(tmp_path, monkeypatch).load(0)
    assert isinstance(table.train.inputs, np.memmap)
    split = prepare_table(table, Preparation(partition=Dirichlet(clients=4)), 0)
    assert (split.train.inputs.dtype, tuple(split.train.inputs.shape)) == (split.test.inputs.dtype, (60, 1, 28, 28))
    assert str(split.train.inputs.dtype) == "torch.uint8"


def test_a_damaged_npz_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.make_chestmnist(tmp_path, monkeypatch)
    for content, message in ((b"nothing", "is no .npz archive"), (None, "is damaged")):
        if content is None:
            np.savez(tmp_path / "chestmnist.npz", train_images=np.zeros(3))
        else:
            (tmp_path / "chestmnist.npz").write_bytes(content)
        data_files.publish_files(monkeypatch, ChestMNIST, tmp_path)
        with pytest.raises(ValueError, match=rf"chestmnist\.npz {message}"):
            ChestMNIST(folder=str(tmp_path)).load(0)
