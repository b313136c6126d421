"""Sizes that no machine can hold end in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.experiments.memory_needs import GIB, check_draw_memory, estimate_draw_bytes, physical_memory
from fedauc.interfaces import BatchSize


def test_a_round_that_fits_is_allowed() -> None:
    needed = estimate_draw_bytes(6, 16, BatchSize(16, 16))
    check_draw_memory(6, 16, BatchSize(16, 16), available=needed)


def test_a_round_that_does_not_fit_is_refused_with_both_numbers() -> None:
    """Two clients, one step and 2^25 rows of 32 bytes are 2 GiB."""
    with pytest.raises(ValueError, match="needs about 2 GiB, and this machine has 1: lower positives"):
        check_draw_memory(2, 1, BatchSize(2**24, 2**24), available=GIB)


def test_the_machine_tells_its_memory() -> None:
    present = physical_memory()
    assert present is not None
    assert present > GIB / 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--positives", "2147483648"], "needs about [0-9,]+ GiB, and this machine has"),
        (
            ["--learning-rate", "1e300"],
            "--learning-rate is 1e[+]300; it must be a finite number above 0 and at most 1e[+]30",
        ),
        (["--stages", "theory", "--stages.ell", "1e308"], "ell is 1e[+]308; .* at most 1e[+]30"),
        (["--model", "mlp", "--model.outputs", "1" + "0" * 30], "outputs is 1000.*; .* at most 1048576"),
        (["--model", "mlp", "--model.hidden", "100000000,100000000"], "hidden is 100000000; .* at most 1048576"),
        (
            ["--model", "mlp", "--model.hidden", "1000000,1000000"],
            "hidden gives layers of 1,000,000 and 1,000,000 units, with 1,000,000,000,000 weights between them",
        ),
        (
            ["--model", "tabular", "--model.width", "1000000", "--model.hidden", "1000000"],
            "width gives layers of 1,000,000",
        ),
        (["--model", "transformer", "--model.width", "1000000"], "width gives layers of 1,000,000 and 4,000,000 units"),
    ],
)
def test_absurd_sizes_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], expected: str
) -> None:
    done = fedauc(capsys, "run", "--cycles", "2", *options, "--out", str(tmp_path / "run"))
    assert done.code == 2
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.err
    assert re.search(expected, line)


def test_a_configuration_with_endless_brackets_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    done = fedauc(capsys, "run", "--config", str(path), "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "nested deeper than any configuration's" in " ".join(done.err.split())
