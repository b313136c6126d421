"""Medicare files that are damaged or truncated: refused in one line that names no provider, and never written."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data_files
from fedauc.data.datasets import medicare
from fedauc.data.datasets.medicare import (
    FEATURES,
    FRAUD,
    LEIE,
    NPI,
    STATE,
    STATES,
    Exclusions,
    Medicare,
    ProviderYear,
    read_exclusions,
    read_provider_year,
    read_years,
    write_years,
)

NOBODY = Exclusions(np.array([1_999_999_999]), np.array([20200101]), 1)
"""A list without any of the providers."""

NAME = "Rndrng_Prvdr_Last_Org_Name"


def in_order(rows: int = 120) -> list[dict[str, Any]]:
    """A year with identifier and name in front, as in the real tables."""
    lines = data_files.make_providers(2018, rows)
    return [{NPI: "", NAME: ""} | line | {NAME: f"Somebody {line[NPI]}"} for line in lines]


def write_table(folder: Path, lines: list[dict[str, Any]]) -> Path:
    data_files.write_csv(folder / "year.csv", lines)
    return folder / "year.csv"


def feature_column(table: ProviderYear, name: str) -> np.ndarray:
    values: np.ndarray = table.inputs[:, FEATURES.index(name)]
    return values


# ------------------------------------------------------------------------------------------------ what a message says


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # The row of the hundredth provider ends after identifier, name and two of the other 33 columns.
        ("cut", "", r"year\.csv is damaged after row 0: a row has 4 fields, the header 35; fetch it again"),
        ("1000000099,", "1000000099X,", r"damaged after row 0: column Rndrng_NPI has a value of another kind"),
        ("1000000099,", ",", "damaged: column Rndrng_NPI has a value that cannot be one"),
        ("1000000099,", "100000099,", "damaged: column Rndrng_NPI has a value that cannot be one"),
        ("1000000099,Some", '1000000099,"Some', "is damaged after row 0"),
    ],
)
def test_no_provider_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = write_table(tmp_path, in_order())
    text = path.read_text()
    if old == "cut":
        row = text.index("1000000099")
        path.write_text(text[:row] + ",".join(text[row:].split(",")[:4]))
    else:
        path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as refused:
        read_provider_year(path, 2018, NOBODY)
    printed = "".join(traceback.format_exception(refused.value))
    assert "Somebody" not in printed
    assert "00000099" not in printed


def test_rows_are_counted_up_to_the_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medicare, "BLOCK", 4096)  # about 15 rows
    path = write_table(tmp_path, in_order())
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ValueError, match="is damaged after row ") as refused:
        read_provider_year(path, 2018, NOBODY)
    damaged_row = int(str(refused.value).partition("after row ")[2].partition(":")[0])
    assert 120 <= damaged_row < 140  # the last of the 140 rows is cut


# ----------------------------------------------------------------------------------------------------- provider tables


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path, in_order())
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    with pytest.raises(ValueError, match=r"year\.csv has no rows: fetch it again"):
        read_provider_year(path, 2018, NOBODY)


@pytest.mark.parametrize("mark", ["\ufeff", "ï»¿", "\ufeffï»¿"])
def test_byte_order_marks_are_no_part_of_the_first_name(mark: str, tmp_path: Path) -> None:
    path = write_table(tmp_path, in_order())
    plain = read_provider_year(path, 2018, NOBODY)
    path.write_text(mark + path.read_text(encoding="utf-8"), encoding="utf-8")
    marked = read_provider_year(path, 2018, NOBODY)
    assert np.array_equal(plain.inputs, marked.inputs)
    data_files.write_csv(tmp_path / "list.csv", [{"NPI": "1000000001", "EXCLTYPE": "1128a1", "EXCLDATE": "20200101"}])
    (tmp_path / "list.csv").write_text(mark + (tmp_path / "list.csv").read_text(), encoding="utf-8")
    assert read_exclusions(tmp_path / "list.csv", FRAUD).providers.tolist() == [1_000_000_001]


@pytest.mark.parametrize("value", ["NaN", "inf", "-inf", "1e300"])
@pytest.mark.parametrize("name", ["Tot_Benes", "Bene_Avg_Age"])
def test_what_is_no_finite_number_is_refused(name: str, value: str, tmp_path: Path) -> None:
    lines = in_order()
    lines[5][name] = value
    with pytest.raises(ValueError, match=rf"year\.csv is damaged: column {name} has a value that cannot be one"):
        read_provider_year(write_table(tmp_path, lines), 2018, NOBODY)


def test_amounts_below_zero_count_as_zero(tmp_path: Path) -> None:
    lines = in_order()
    lines[5]["Tot_Mdcr_Pymt_Amt"], lines[6]["Tot_Mdcr_Pymt_Amt"] = "-0.5", "-20"
    paid = feature_column(read_provider_year(write_table(tmp_path, lines), 2018, NOBODY), "Tot_Mdcr_Pymt_Amt")
    assert np.flatnonzero(paid == 0).tolist() == [5, 6]


def test_states_are_recognised_by_their_full_name(tmp_path: Path) -> None:
    lines = in_order()
    for line in lines[:10]:
        line[STATE] = "ALASKA"
    lines[10][STATE] = ""
    table = read_provider_year(write_table(tmp_path, lines), 2018, NOBODY)
    # Rows 0 to 10 are of no state; row 11 is of the twelfth, and so on.
    assert table.states.tolist() == [row % 50 for row in range(11, 120)]
    assert STATES[table.states[0]] == lines[11][STATE]


def test_quoted_line_breaks_may_lie_at_a_blocks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = in_order(1000)
    expected = read_provider_year(write_table(tmp_path, lines), 2018, NOBODY)
    for line in lines:
        line[NAME] = "A" * 30 + "\n" + "B" * 30
    monkeypatch.setattr(medicare, "BLOCK", 4096)  # about 12 rows: 80 ends, one in ten of them in a name
    table = read_provider_year(write_table(tmp_path, lines), 2018, NOBODY)
    assert np.array_equal(table.states, expected.states)
    assert np.allclose(table.inputs, expected.inputs, rtol=1e-6)  # blanks get a mean that is summed in another order


# --------------------------------------------------------------------------------------------------- the exclusion list


@pytest.mark.parametrize(
    "line",
    [
        "Someone,10000",
        'Someone,1000000099,1128a1,20200101,"0',
        'Som"eone,1000000099,1128a1,20200101,0,0',
        "Someone,1000000099,1128a1,2018,0",
        "Someone,1000000099,1128a1,2018121,0",
        "Someone,1000000099,1128a1,99999999,0",
        "Someone,1000000099,1128a1,20230229,0",
        "Someone,1000000099,1128a1,01/02/2020,0",
        "Someone,100000009,1128a1,20200101,0",
        "Someone,-100000009,1128a1,20200101,0",
        "Someone,,1128b8,20200101,0",
        f'"{"Someone" * 20_000}",1000000099,1128a1,20200101,0',  # longer than the 131,072 characters csv allows
    ],
)
def test_a_damaged_entry_is_reported_by_its_line_number_only(line: str, tmp_path: Path) -> None:
    path = tmp_path / "UPDATED.csv"
    data_files.write_csv(path, data_files.LISTED)
    path.write_text(path.read_text() + line)
    # A header and ten entries come before it.
    with pytest.raises(ValueError, match=r"UPDATED\.csv is damaged in line 12: fetch it again") as refused:
        read_exclusions(path, FRAUD)
    printed = "".join(traceback.format_exception(refused.value))
    assert "Someone" not in printed
    assert "100000009" not in printed


def test_empty_lines_are_no_entries(tmp_path: Path) -> None:
    path = tmp_path / "UPDATED.csv"
    data_files.write_csv(path, data_files.LISTED)
    path.write_text(path.read_text() + "\n\n")
    assert read_exclusions(path, FRAUD).entries == 10


def test_seven_types_are_fraud(tmp_path: Path) -> None:
    """The table of Herland, Khoshgoftaar and Bauder 2018, https://doi.org/10.1186/s40537-018-0138-3, and no other."""
    fraud = ["1128a1", "1128a2", "1128a3", "1128b4", "1128b7", "1128c3gi", "1128c3gii"]
    others = ["1128a4", "1128b1", "1128b5", "1128b6", "1128b8", "1128b14", "1128b15", "1156", "1128Aa"]
    lines = [
        data_files.make_exclusion(1_000_000_000 + row, kind, "20200101") for row, kind in enumerate(fraud + others)
    ]
    data_files.write_csv(tmp_path / "UPDATED.csv", lines)
    assert read_exclusions(tmp_path / "UPDATED.csv", FRAUD).providers.tolist() == [
        1_000_000_000 + row for row in range(7)
    ]


# ------------------------------------------------------------------------------------------------------ what is parsed


def test_a_sample_that_was_parsed_is_held_to_the_bounds_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.make_medicare(tmp_path, monkeypatch).load(0)
    # Every year has 120 rows; the list has 10 entries, one for every 20 of 200 rows.
    Medicare(str(tmp_path), min_rows=120).load(0)
    with pytest.raises(ValueError, match=r"DY17_Prov\.csv has 120 rows of the 50 states; .* at least min_rows, 121"):
        Medicare(str(tmp_path), min_rows=121).load(0)
    with pytest.raises(ValueError, match="at least min_rows, 900000"):
        Medicare(str(tmp_path)).load_parsed()
    assert len(list((tmp_path / "parsed").glob("medicare-*"))) == 1


def test_a_short_list_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    data_files.write_csv(tmp_path / "UPDATED.csv", data_files.LISTED[:4])
    with pytest.raises(ValueError, match=r"UPDATED\.csv has 4 entries; it must have at least min_rows / 20, 5: fetch"):
        dataset.load(0)
    assert not list((tmp_path / "parsed").glob("medicare-*"))
    data_files.write_csv(tmp_path / "UPDATED.csv", data_files.LISTED[:5])
    assert int(dataset.load(0).test.labels.sum()) == 5


def test_the_manifest_has_the_rows_of_every_year(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.make_medicare(tmp_path, monkeypatch).load(0)
    (manifest,) = (tmp_path / "parsed").glob("*/manifest.json")
    years = {str(year): 120 for year in range(2017, 2023)}
    assert json.loads(manifest.read_text())["counts"] == years | {
        "listed": 10,
        "train": 480,
        "validation": 120,
        "test": 120,
    }


def test_another_rule_is_parsed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    assert int(dataset.load(0).train.labels.sum()) == 28
    monkeypatch.setattr(medicare, "FRAUD", FRAUD - {"1128a1"})
    # Without the six under 1128(a)(1): two providers in 2017 and in 2018.
    assert int(dataset.load(0).train.labels.sum()) == 4
    places = {dataset.parsed_folder()}
    monkeypatch.setattr(medicare, "FORMAT", medicare.FORMAT + 1)
    assert dataset.parsed_folder() not in places


def test_only_a_name_that_ends_so_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    path = tmp_path / "MUP_PHY_R24_P07_V10_DY17_Prov.csv"
    shutil.copy(path, tmp_path / f"{path.name}.old.csv")
    assert dataset.find_files()[0].path == path
    path.unlink()
    with pytest.raises(ValueError, match="medicare needs MUP_PHY_R25_P07_V20_D17_Prov"):
        dataset.find_files()


def test_a_fetched_file_must_have_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    year = tmp_path / "MUP_PHY_R24_P07_V10_DY17_Prov.csv"
    dataset.check_download(dataset.sources[0], year)
    dataset.check_download(LEIE, tmp_path / LEIE.name)
    # Of the 34 columns that are read three are named.
    with pytest.raises(ValueError, match=r"UPDATED\.csv lacks the columns Rndrng_NPI, \w+, \w+ and 31 more: it is"):
        dataset.check_download(dataset.sources[0], tmp_path / LEIE.name)
    with pytest.raises(ValueError, match=r"DY17_Prov\.csv lacks the columns NPI, EXCLTYPE, EXCLDATE"):
        dataset.check_download(LEIE, year)


# ------------------------------------------------------------------------------------------------------- a full disk


def test_years_are_written_one_after_the_other(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    codes = (np.arange(100) % 50).astype(np.int8)
    years = [ProviderYear(draw.standard_normal((100, 32), dtype=np.float32), codes % 2, codes) for _ in range(6)]
    counts = write_years(years, tmp_path)
    arrays = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("inputs", "labels", "states")}
    read = read_years(arrays, counts)
    assert read.validation is not None
    train = np.concatenate([year.inputs for year in years[:4]]).astype(np.float64)
    for rows, year in ((read.validation, years[4]), (read.test, years[5])):
        assert np.allclose(rows.inputs, (year.inputs - train.mean(0)) / train.std(0), atol=1e-5)


FILL = """
import sys
from pathlib import Path
import numpy as np
from fedauc.data.datasets.medicare import ProviderYear, write_years
codes = np.zeros(1000, np.int8)
try:
    write_years([ProviderYear(np.ones((1000, 32), np.float32), codes, codes)] * 6, Path(sys.argv[1]))
except OSError as error:
    print(error.strerror)
"""
"""Writes 6,000 rows of 32 floats, three times what the disk below has room for."""


def test_a_full_disk_is_an_error_and_kills_nothing(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=256k disk {shlex.quote(str(tmp_path))}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, mount], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    command = [*alone, f'{mount} && exec "$0" "$@"', sys.executable, "-c", FILL, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "No space left on device\n"), process.stderr
