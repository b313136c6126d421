"""Medicare by state: the label rule, the split by years, what is written and what never is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import data_files
from fedauc.data import Preparation, prepare_table
from fedauc.data.datasets.creditcard import CreditCardFull
from fedauc.data.datasets.medicare import FEATURES, FRAUD, STATES, Medicare, read_exclusions, read_provider_year
from fedauc.data.datasets.synthetic import SyntheticMedicare


def write_exclusions(folder: Path, *lines: dict[str, object]) -> Path:
    data_files.write_csv(folder / "UPDATED.csv", list(lines))
    return folder / "UPDATED.csv"


def test_exclusions_are_selected_by_type_with_their_last_day(tmp_path: Path) -> None:
    path = write_exclusions(
        tmp_path,
        data_files.make_exclusion(7, "1128b7", "20200601"),
        data_files.make_exclusion(7, "1128a1", "20100101"),
        data_files.make_exclusion(5, "1128B4", "20190101"),
        data_files.make_exclusion(9, "1128b8", "20190101"),
        data_files.make_exclusion(0, "1128a1", "20190101"),
    )
    fraud, everything = read_exclusions(path, FRAUD), read_exclusions(path, None)
    assert (fraud.providers.tolist(), fraud.days.tolist()) == ([5, 7], [20190101, 20200601])
    assert everything.providers.tolist() == [5, 7, 9]


def test_a_year_is_positive_until_the_exclusion_comes(tmp_path: Path) -> None:
    exclusions = read_exclusions(write_exclusions(tmp_path, *data_files.LISTED), FRAUD)
    data_files.write_csv(tmp_path / "year.csv", data_files.make_providers(2018))
    years = {year: read_provider_year(tmp_path / "year.csv", year, exclusions) for year in (2018, 2019, 2024)}
    # Providers 0, 2, ..., 10 are excluded in November 2023, 3 on the first day of 2018 and 5 on the last.
    assert np.flatnonzero(years[2018].labels).tolist() == [0, 2, 3, 4, 5, 6, 8, 10]
    assert np.flatnonzero(years[2019].labels).tolist() == [0, 2, 4, 6, 8, 10]
    assert not years[2024].labels.any()


def test_features_are_the_columns_that_were_written(tmp_path: Path) -> None:
    lines = data_files.make_providers(2018)
    data_files.write_csv(tmp_path / "year.csv", lines)
    table = read_provider_year(
        tmp_path / "year.csv", 2018, read_exclusions(write_exclusions(tmp_path, *data_files.LISTED), FRAUD)
    )
    assert table.inputs.shape == (120, len(FEATURES))  # the 20 rows of Puerto Rico are left out
    assert [STATES[index] for index in table.states[:3]] == ["AL", "AK", "AZ"]

    def column(name: str) -> np.ndarray:
        return np.asarray(table.inputs[:, FEATURES.index(name)], dtype=np.float64)

    paid = np.array([float(line["Tot_Mdcr_Pymt_Amt"]) for line in lines[:120]])
    assert np.allclose(column("Tot_Mdcr_Pymt_Amt"), np.log1p(paid), rtol=1e-6)
    assert np.array_equal(column("Rndrng_Prvdr_Ent_Cd"), np.arange(120) % 5 == 0)
    assert not column("Bene_Feml_Cnt")[::7].any()  # blank: suppressed, so below 11
    ages = np.array([float(line["Bene_Avg_Age"] or "nan") for line in lines[:120]])
    assert np.allclose(column("Bene_Avg_Age"), np.where(np.isnan(ages), np.nanmean(ages), ages), rtol=1e-6)


def test_years_are_parts_and_states_are_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = data_files.make_medicare(tmp_path, monkeypatch).load(0)
    assert table.validation is not None
    # Four years of 120 rows, with 8 positives in 2017 and 2018 and 6 from then on.
    parts = (table.train, table.validation, table.test)
    assert [(int(rows.labels.sum()), len(rows.labels)) for rows in parts] == [(28, 480), (6, 120), (6, 120)]
    assert np.abs(np.asarray(table.train.inputs, dtype=np.float64).mean(0)).max() < 1e-6
    assert isinstance(table.train.inputs, np.memmap)
    split = prepare_table(table, Preparation(), 0)
    assert len(split.train) == 50
    assert set(split.train.names) == set(STATES)


def test_all_exclusions_may_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(data_files.make_medicare(tmp_path, monkeypatch).load(0).test.labels.sum()) == 6
    table = Medicare(str(tmp_path), exclusions="all", min_rows=100).load(0)
    assert int(table.test.labels.sum()) == 7  # provider 1 was excluded under 1128(b)(8)


def test_nothing_that_identifies_a_provider_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an identifier nor a name, as text or as an integer of any width, is in the parsed files."""
    data_files.make_medicare(tmp_path, monkeypatch).load(0)
    files = [path for path in (tmp_path / "parsed").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"inputs.npy", "labels.npy", "states.npy", "manifest.json"}
    content = b"".join(path.read_bytes() for path in files)
    for row in range(140):
        provider = 1_000_000_000 + row
        for trace in (str(provider).encode(), provider.to_bytes(8, "little"), np.float64(provider).tobytes()):
            assert trace not in content
    assert b"Name" not in content


def test_a_new_file_is_parsed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    positives = int(dataset.load(0).test.labels.sum())
    write_exclusions(tmp_path, *data_files.LISTED, data_files.make_exclusion(1_000_000_050, "1128a1", "20240101"))
    assert int(dataset.load(0).test.labels.sum()) == positives + 1


def damage_file(folder: Path, how: str) -> None:
    path = folder / "MUP_PHY_R24_P07_V10_DY19_Prov.csv"
    if how == "cut":
        path.write_text(path.read_text()[:-200])
    elif how == "columns":
        path.write_text(path.read_text().replace("Tot_Srvcs", "Services", 1))
    elif how == "short":
        data_files.write_csv(path, data_files.make_providers(2019, rows=60))
    elif how == "twice":
        (folder / "MUP_PHY_R25_P07_V20_D19_Prov.csv").write_bytes(path.read_bytes())
    else:
        (folder / "UPDATED.csv").write_text("NPI,EXCLTYPE,EXCLDATE\nx,1128a1,20200101\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", r"DY19_Prov\.csv is damaged"),
        ("columns", r"DY19_Prov\.csv lacks the columns Tot_Srvcs"),
        ("short", r"DY19_Prov\.csv has 60 rows of the 50 states; it must have at least min_rows, 100"),
        ("twice", r"has 2 releases of 2019 \(.*\): keep one"),
        ("list", r"UPDATED\.csv is damaged in line 2"),
    ],
)
def test_a_damaged_table_is_named(how: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    damage_file(tmp_path, how)
    with pytest.raises(ValueError, match=message):
        dataset.load(0)


def test_every_missing_table_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_medicare(tmp_path, monkeypatch)
    (tmp_path / "MUP_PHY_R24_P07_V10_DY20_Prov.csv").unlink()
    (tmp_path / "UPDATED.csv").unlink()
    with pytest.raises(ValueError, match=r"medicare needs MUP_PHY_R25_P07_V20_D20_Prov\.csv and 1 more in"):
        dataset.load(0)


def test_the_synthetic_rows_have_the_shape_of_the_real_data() -> None:
    dataset = SyntheticMedicare(rows=40_000, positive_rate=0.01)
    table = dataset.load(0)
    assert table.note.startswith("SYNTHETIC")
    assert table.train.client is not None
    assert int(table.train.labels.sum()) == 400
    sizes = [int((table.train.client == state).sum()) for state in STATES]
    assert min(sizes) > 0
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] / sizes[9] == pytest.approx(10, rel=0.01)  # the tenth state has a tenth of the first's rows
    test = table.test
    inputs = np.asarray(test.inputs, dtype=np.float64)
    direction = inputs[test.labels == 1].mean(0) - inputs[test.labels == 0].mean(0)
    # 100 positives, and 32 coordinates of the direction that are fitted on them: far from the 0.5 of no separation.
    assert 0.75 < roc_auc_score(test.labels, inputs @ direction) < 0.95
    assert (SyntheticMedicare().rows, SyntheticMedicare().positive_rate) == (4_000_000, 0.0007)
    with pytest.raises(ValueError, match="rows is 10; it must be a whole number of at least 2000"):
        SyntheticMedicare(rows=10)


def test_the_full_card_file_has_the_samples_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_creditcard_full(tmp_path, monkeypatch)
    table = dataset.load(0)
    assert table.train.client is not None
    written = np.genfromtxt(tmp_path / "creditcard.csv", delimiter=",", names=True, deletechars='"', usecols=range(30))
    inputs = dataset.load_parsed().arrays["inputs"]
    assert np.array_equal(inputs[:, 0], written["V1"].astype(np.float32))
    assert np.array_equal(inputs[:, 28], written["Amount"].astype(np.float32))
    assert sorted(set(table.train.client)) == [f"hour-{hour:02d}" for hour in range(48)]
    # Two frauds in each of 48 hours, 30 % of them (29) held out.
    assert (int(table.train.labels.sum()), int(table.test.labels.sum())) == (67, 29)
    assert table.train.inputs.shape[1] == 29
    assert CreditCardFull(hours_per_group=6).hours_per_group == 6
