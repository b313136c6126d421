"""A run folder with any damaged file, and any table, end in a result or in one line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.fuzzing import check_outcome, damaged_bytes, fuzz, run_command

RUN = ("--cycles", "2", "--local-steps", "1", "--positives", "2", "--negatives", "2")


class Originals(NamedTuple):
    """Intact folders and files that examples copy and damage."""

    run: Path
    unfinished: Path
    tables: dict[str, Path]
    scratch: Path


@pytest.fixture(scope="module")
def originals() -> Iterator[Originals]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tables = write_tables(home)
        words = ("run", "--data", "table", "--data.path", str(tables["csv"]), "--data.client", "site", *RUN)
        assert run_command(*words, "--data.label", "sick", "--out", str(home / "run")).code == 0
        shutil.copytree(home / "run", home / "unfinished")
        (home / "unfinished" / "result.json").unlink()
        scratch = home / "scratch"
        scratch.mkdir()
        yield Originals(home / "run", home / "unfinished", tables, scratch)


def write_tables(home: Path) -> dict[str, Path]:
    """The same rows in every format that is read."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(generator.normal(size=(60, 3)).round(3), columns=["a", "b", "c"])
    frame["kind"] = np.array(["x", "y", "z"])[generator.integers(0, 3, 60)]
    frame["sick"] = np.arange(60) % 4 == 0
    frame["sick"] = frame["sick"].astype(int)
    frame["site"] = np.array(["s0", "s1", "s2"])[np.arange(60) % 3]
    paths = {name: home / f"table.{name}" for name in ("csv", "jsonl", "parquet", "arrow", "npz", "csv.gz")}
    frame.to_csv(paths["csv"], index=False)
    frame.to_csv(paths["csv.gz"], index=False)
    frame.to_json(paths["jsonl"], orient="records", lines=True)
    frame.to_parquet(paths["parquet"])
    frame.to_feather(paths["arrow"])
    inputs = frame[["a", "b", "c"]].to_numpy(np.float32)
    names = frame["site"].to_numpy().astype(str)
    np.savez(paths["npz"], inputs=inputs, labels=frame["sick"].to_numpy(np.int8), client=names)
    return paths


COMMANDS = (
    ("show", "{folder}"),
    ("show", "{folder}", "--json"),
    ("predict", "{folder}", "{table}"),
    ("threshold", "{folder}", "--fpr", "0.1"),
    ("report", "{folder}"),
    ("calibrate", "{folder}"),
)


@fuzz(60)
@given(st.data())
def test_a_damaged_run_folder_is_read_or_refused(originals: Originals, data: st.DataObject) -> None:
    folder = originals.scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(originals.run, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
    damage_file(data, files)
    words = data.draw(st.sampled_from(COMMANDS))
    check_outcome(run_command(*(word.format(folder=folder, table=originals.tables["csv"]) for word in words)))


@fuzz(40)
@given(st.data())
def test_a_damaged_unfinished_run_is_resumed_or_refused(originals: Originals, data: st.DataObject) -> None:
    folder = originals.scratch / "unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(originals.unfinished, folder)
    names = ("config.json", "environment.json", "roster.json", "records.jsonl", "timing.jsonl", "checkpoints/*")
    damage_file(data, sorted(path for name in names for path in folder.glob(name)))
    check_outcome(run_command("resume", str(folder)))


@fuzz(60)
@given(st.data())
def test_a_damaged_table_is_trained_on_or_refused(originals: Originals, data: st.DataObject) -> None:
    original = data.draw(st.sampled_from(sorted(originals.tables.values())))
    table, out = originals.scratch / original.name, originals.scratch / "new"
    table.write_bytes(data.draw(damaged_bytes(original.read_bytes())))
    shutil.rmtree(out, ignore_errors=True)
    if data.draw(st.booleans()):
        check_outcome(run_command("predict", str(originals.run), str(table)))
        return
    roles = () if table.suffix == ".npz" else ("--data.client", "site", "--data.label", "sick")
    check_outcome(run_command("run", "--data", "table", "--data.path", str(table), *roles, *RUN, "--out", str(out)))


def damage_file(data: st.DataObject, files: list[Path]) -> None:
    """Damage the bytes of one file, or replace a JSON file by another value, or remove it."""
    path = data.draw(st.sampled_from(files))
    match data.draw(st.sampled_from(["bytes", "bytes", "bytes", "remove", "null", "list", "empty"])):
        case "bytes":
            path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
        case "remove":
            path.unlink()
        case "null":
            path.write_text("null\n")
        case "list":
            path.write_text('[1, {"round": "x"}]\n')
        case _:
            path.write_bytes(b"")
