"""What fuzzing has found, each as a test of its own."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.cli import describe_memory_error
from fedauc.data.datasets.chestmnist import ChestMNIST
from fedauc.data.summaries import summarize_numbers
from fedauc.discovery import UnknownName, lookup
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.federation.visit_messages import build_setting, phase_from_json, phase_to_json
from fedauc.interfaces import BatchSize, Phase
from fedauc.stages import Budget, Geometric
from fuzz.fuzzing import limited_memory

WORDS = ("run", "--data", "synthetic", "--data.clients", "4", "--cycles", "2", "--local-steps", "1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedauc.data.datasets.synthetic import Synthetic
    from fedauc.experiments.runner import Run

    out = tmp_path_factory.mktemp("runs") / "run"
    recipe = Recipe.of("cycp-pairwise", cycles=2, local_steps=1)
    Run.create(Config(recipe=recipe, data=Synthetic(clients=4)), out).train_to_end()
    return out


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 3, 2.5])
def test_a_name_that_is_no_text_is_unknown(name: Any) -> None:
    with pytest.raises(UnknownName, match="unknown method"):
        lookup("method", name, {"a": 1, "b": 2})
    with pytest.raises(UnknownName, match="known: 1, 2"):
        lookup("choice", ["a"], {1: 1, 2: 2})  # type: ignore[arg-type, dict-item]


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_a_number_beyond_the_largest_float_is_refused(value: int) -> None:
    document = Config(recipe=Recipe.of("cycp-pairwise")).to_document()
    for field in ("seed", "learning_rate", "local_steps", "cycles"):
        changed = {**document, "recipe": {**document["recipe"], field: value}}
        with pytest.raises(ValueError, match=f"{field} is -?1000"):
            Config.from_json(json.dumps(changed))


@pytest.mark.parametrize("cycles", ["1" + "0" * 30, "1000000001"])
def test_more_cycles_than_anybody_trains_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cycles: str
) -> None:
    done = fedauc(capsys, "run", "--cycles", cycles, "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "at most 1000000000: lower --cycles" in done.err


def test_a_schedule_of_endless_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="which takes more than 10000 stages"):
        Geometric(initial=1, scale=1.0).divide_budget(Budget(10**9, 0.1, 4, 8, 6))
    # Their lengths and learning rates leave the range of floating-point numbers on the way.
    stages = Geometric(initial=1, scale=1e30, decay=1e-30).divide_budget(Budget(10**9, 0.1, 4, 8, 6))
    assert sum(stage.cycles for stage in stages) == 10**9


def test_local_steps_that_grow_beyond_the_memory_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first stage fits; the last one has a thousand times its local steps."""
    growing = ("--stages", "geometric", "--stages.initial", "1", "--stages.decay", "0.000001")
    batch = ("--positives", "1000000", "--negatives", "1000000", "--stages.local-steps", "adaptive")
    done = fedauc(capsys, *WORDS, *growing, *batch, "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "GiB, and this machine has" in done.err


@pytest.mark.parametrize("content", ["null\n", "[1]\n", '{"round": "x"}\n', '{"cycle": 1}\n', "[" * 100_000 + "\n"])
def test_a_record_of_another_kind_is_named(finished: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "records.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"records\.jsonl is damaged in line 1"):
        RunFolder(tmp_path / "run").read_records()


@pytest.mark.parametrize("name", ["result.json", "environment.json"])
@pytest.mark.parametrize("content", ["null", "[]", "{", "{}"])
def test_a_damaged_description_is_one_line(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path, name: str, content: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    for words in (("show", "--json"), ("report",), ("show",)):
        done = fedauc(capsys, words[0], str(tmp_path / "run"), *words[1:])
        assert done.code in (0, 2)
        assert "Traceback" not in done.err


def test_damaged_scores_do_not_break_the_choice_of_a_threshold(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "scores.npz").write_bytes((finished / "scores.npz").read_bytes()[:-30])
    done = fedauc(capsys, "threshold", str(tmp_path / "run"), "--fpr", "0.1")
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1


def test_a_run_that_has_lost_its_last_record_is_refused(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    records = tmp_path / "run" / "records.jsonl"
    records.write_text("".join(line + "\n" for line in records.read_text().splitlines()[:-1]))
    done = fedauc(capsys, "resume", str(tmp_path / "run"))
    assert done.code == 2
    assert "has lost the record of round" in done.err
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_gzip_file_with_a_damaged_stream_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.csv.gz"
    content = bytearray(gzip.compress(b"a,sick,site\n" + b"1,0,x\n2,1,y\n3,0,z\n" * 400, mtime=0))
    content[10:40] = b"\xff" * 30
    table.write_bytes(content)
    words = ("run", "--data", "table", "--data.path", str(table), "--data.client", "site", "--data.label", "sick")
    done = fedauc(capsys, *words, "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "it is no intact gzip file" in done.err


@pytest.mark.parametrize("clients", [10**12, 0, -1, "4", None])
def test_a_message_with_an_absurd_number_of_sites_is_refused_without_memory(clients: Any) -> None:
    header = {"client": 0, "class_totals": [clients, 2, [1, 2], [3, 4]], "cycle_length": 2}
    with limited_memory(2**28), pytest.raises(ValueError, match="the message speaks of"):
        build_setting(header, Recipe.of("cycp-pairwise"), (1, 2))


@pytest.mark.parametrize(
    "change", [{"local_steps": 10**9}, {"local_steps": 2.5}, {"batch": [2**40, 1]}, {"batch": [-1, 1]}]
)
def test_a_message_with_an_absurd_phase_is_refused(change: dict[str, Any]) -> None:
    plain = phase_to_json(Phase(0, 0, 0, 0.1, 4, BatchSize(2, 2), False, True, False, False))
    assert phase_from_json(plain).local_steps == 4
    with pytest.raises(ValueError, match=r"the message asks for|needs about"):
        phase_from_json({**plain, **change})


def test_refused_memory_is_described_with_its_size() -> None:
    torch_says = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 274877906944 bytes.")
    assert "needs about 256.0 GiB at once" in describe_memory_error(torch_says)
    numpy_says = MemoryError("Unable to allocate 256. GiB for an array with shape (1, 2)")
    assert "needs about 256. GiB at once" in describe_memory_error(numpy_says)
    assert "more memory than it may have" in describe_memory_error(MemoryError())


def test_a_folder_that_no_file_system_can_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"folder is '9+', which cannot be read \(File name too long\); give the folder"
    ):
        ChestMNIST(folder="9" * 300).find_files()


def test_sums_of_values_that_are_too_large_warn_of_nothing() -> None:
    """The values are refused later, in one line, which says where they are."""
    summary = summarize_numbers(np.array([np.inf, 1.0, 1.7e308, 1.7e308]))
    assert np.isnan(summary.squares).all()
