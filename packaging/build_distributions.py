"""Build the wheel and the source distribution so that two builds of one commit are the same, byte for byte.

    python packaging/build_distributions.py dist

The files that git tracks are copied and built there, so that nothing else of a working tree gets in. Times come from
SOURCE_DATE_EPOCH, or from the last commit. setuptools follows it for wheels; source distributions are packed again.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build_distributions(out: Path) -> list[Path]:
    """Build both files into a folder, and return their paths."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run_git("log", "-1", "--format=%ct"))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy_tracked_files(Path(scratch), epoch)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
        paths = []
        for hook in ("build_sdist", "build_wheel"):
            command = [sys.executable, "-W", "ignore", "-c", BUILD, hook, str(out.absolute())]
            done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            paths.append(out / done.stdout.split()[-1])
    repack_source(paths[0], epoch)
    return paths


def run_git(*arguments: str) -> str:
    """What a git command prints about this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def copy_tracked_files(target: Path, epoch: int) -> None:
    """Copy what git tracks, with one time and plain permissions."""
    for name in run_git("ls-files", "-z").rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path)
            path.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
            os.utime(path, (epoch, epoch))


def repack_source(path: Path, epoch: int) -> None:
    """Sort the members of a .tar.gz file, and remove times and owners."""
    packed = io.BytesIO()
    with tarfile.open(path) as source, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())


if __name__ == "__main__":
    for built in build_distributions(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")):
        print(built)
