"""The model of a disk forgets what POSIX allows it to forget, and what the library has written stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedauc.files import append_durably, make_folder, move_folder, write_atomically
from federation_simulation.disk import Disk, DiskLayer, ProcessKilled

TRIALS = 30
"""Power losses of one kind: what survives each with a probability of at most two thirds is lost in one of them."""


class TriedDisk:
    """A disk whose power fails before the operation of that number, or at the end."""

    def __init__(self, home: Path, number: int, fails_at: int = -1) -> None:
        self.operations, self.fails_at = 0, fails_at
        home.mkdir()
        self.layer = DiskLayer(home)
        self.disk = Disk(home / "disk", self.take_step, np.random.default_rng(number))
        self.layer.disks["disk"] = self.disk
        self.folder = self.disk.folder

    def take_step(self, operation: str) -> None:
        self.operations += 1
        if self.operations == self.fails_at:
            self.disk.crash(True)
            raise ProcessKilled

    def lose_power_after(self, work: Callable[[Path], None]) -> None:
        """Do some work, and lose power when it is done, or where the disk was told to."""
        with self.layer.installed():
            try:
                work(self.folder)
                self.disk.crash(True)
            except ProcessKilled:
                pass
            with self.layer.bypassed():
                self.disk.recover(True)


def try_disks(home: Path) -> Iterator[TriedDisk]:
    return (TriedDisk(home / str(number), number) for number in range(TRIALS))


def write_carelessly(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")


def test_what_is_not_synced_may_be_lost_cut_or_stay(tmp_path: Path) -> None:
    found = set()
    for tried in try_disks(tmp_path):
        tried.lose_power_after(write_carelessly)
        path = tried.folder / "file"
        found.add(path.read_bytes() if path.exists() else None)
    assert {None, b"", b"content"} < found
    assert len(found) > 3, "it is cut somewhere, too"


def test_a_renamed_file_that_is_not_synced_may_be_empty(tmp_path: Path) -> None:
    """The name is durable here, and the content is not."""

    def rename_first(folder: Path) -> None:
        (folder / "part").write_bytes(b"content")
        (folder / "part").replace(folder / "file")
        with append_durably(folder / "other") as file:
            file.write(b"syncs the folder as well")

    contents = set()
    for tried in try_disks(tmp_path):
        tried.lose_power_after(rename_first)
        contents.add((tried.folder / "file").read_bytes())
    assert {b"", b"content"} < contents


def write_file(folder: Path) -> None:
    write_atomically(folder / "file", b"content")


def append_line(folder: Path) -> None:
    with append_durably(folder / "file") as file:
        file.write(b"content")


def write_into_new_folders(folder: Path) -> None:
    make_folder(folder / "one" / "two")
    write_atomically(folder / "one" / "two" / "file", b"content")


def move_finished_folder(folder: Path) -> None:
    make_folder(folder / "part")
    write_atomically(folder / "part" / "file", b"content")
    move_folder(folder / "part", folder / "one")


@pytest.mark.parametrize("work", [write_file, append_line, write_into_new_folders, move_finished_folder])
def test_what_the_library_has_written_survives_the_loss_of_power(work: Callable[[Path], None], tmp_path: Path) -> None:
    for tried in try_disks(tmp_path):
        tried.lose_power_after(work)
        (path,) = (path for path in tried.folder.rglob("*") if path.is_file())
        assert path.name == "file"
        assert path.read_bytes() == b"content"


@pytest.mark.parametrize("work", [write_file, move_finished_folder])
def test_wherever_the_power_fails_a_file_is_complete_or_absent(work: Callable[[Path], None], tmp_path: Path) -> None:
    outcomes = set()
    for fails_at in range(1, 12):
        for number in range(5):
            tried = TriedDisk(tmp_path / f"{fails_at}-{number}", number, fails_at)
            tried.lose_power_after(work)
            found = [path.read_bytes() for path in tried.folder.rglob("*") if path.name == "file"]
            if work is write_file:
                outcomes.add(b"".join(found))
            elif (tried.folder / "one").is_dir():
                outcomes.add((tried.folder / "one" / "file").read_bytes())
            else:
                outcomes.add(b"")
    assert outcomes == {b"", b"content"}


def test_a_folder_that_a_killed_process_made_is_made_durable_by_the_next(tmp_path: Path) -> None:
    """The process was killed between making the folder and syncing its name."""

    def find_empty_folder(folder: Path) -> None:
        (folder / "one").mkdir()
        write_into_new_folders(folder)

    for number in range(TRIALS):
        tried = TriedDisk(tmp_path / str(number), number)
        tried.lose_power_after(find_empty_folder)
        assert (tried.folder / "one" / "two" / "file").read_bytes() == b"content"
