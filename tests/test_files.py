"""Files that are there whole or not at all, whoever writes them and whenever a process is killed."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedauc.files import write_atomically

START = "import os, signal, sys; from pathlib import Path; from fedauc.files import write_atomically\n"


def start_process(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", START + program, *arguments], stderr=subprocess.PIPE, text=True)


def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    """200 writes each of 100 kB of one letter: both get to their ends, and the file is one of the two."""
    program = "for _ in range(200): write_atomically(Path(sys.argv[1]), sys.argv[2].encode() * 100_000)"
    path = tmp_path / "file"
    writers = [start_process(program, str(path), letter) for letter in "ab"]
    assert [writer.communicate(timeout=120)[1] for writer in writers] == ["", ""]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert path.read_bytes() in (b"a" * 100_000, b"b" * 100_000)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A folder cannot be replaced by a file."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomically(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    """Killed before its bytes are on the disk; what a process that lives is writing stays."""
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    dying = "os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
    killed = start_process(dying + "write_atomically(Path(sys.argv[1]), b'new')", str(path))
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    living = tmp_path / f".other.json.{platform.node()}-{os.getppid()}.part"
    living.write_bytes(b"half")
    write_atomically(path, b"newer")
    assert sorted(tmp_path.iterdir()) == sorted([path, living])
    assert path.read_bytes() == b"newer"
