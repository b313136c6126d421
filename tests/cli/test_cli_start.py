"""Help, lists and usage errors come at once: the real command in a process of its own does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from fedauc.__main__ import main
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("torch._C" in sys.modules, "numpy._core" in sys.modules, used.ru_utime + used.ru_stime, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--version", 0),
        ("--help", 0),
        ("list", 0),
        ("list objectives", 0),
        ("list data", 0),
        ("list models", 0),
        ("list engines", 0),
        ("run --help", 0),
        ("bogus", 2),
        ("list bogus", 2),
        ("run --bogus 1", 2),
        ("run --cycles x --out made", 2),
        ("run --cycles 0 --out made", 2),
        ("run --method bogus --out made", 2),
        ("run --engine bogus --out made", 2),
        ("compare --methods bogus --out made", 2),
        ("sweep --vary bogus=1 --out made", 2),
        ("tune --search bogus=1:2 --out made", 2),
    ],
)
def test_a_command_that_does_not_train_loads_neither_torch_nor_numpy(tmp_path: Path, words: str, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    torch_loaded, numpy_loaded, seconds = done.stderr.splitlines()[-1].split()
    assert done.returncode == code, done.stderr
    assert torch_loaded == "False"
    assert numpy_loaded == "False"
    # Between .1 and .6 s on an old machine under load; torch alone takes more than 2 s.
    assert float(seconds) < 1.5
    assert list(tmp_path.iterdir()) == []


def test_a_run_finishes_the_import_of_torch(tmp_path: Path) -> None:
    words = ("run", "--data", "synthetic", "--cycles", "1", "--local-steps", "1", "--out", "made")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1].startswith("True ")
    assert (tmp_path / "made" / "result.json").is_file()


def test_a_submodule_of_a_delayed_package_asks_for_the_package_first() -> None:
    program = """
from fedauc.cli.lazy_import import delay_import, finish_import
delay_import("torch")
import torch
try:
    import torch.distributed
except ModuleNotFoundError:
    print("refused")
finish_import("torch")
import torch.distributed
print(type(torch).__name__, torch.distributed.is_available() in (True, False), torch.zeros(2).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["refused", "module True 0.0"]


def test_the_library_is_imported_as_usual() -> None:
    program = "import fedauc; print(fedauc.fit.__module__, sorted(set(fedauc.__all__) - set(dir(fedauc))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fedauc.experiments.fitting []"
