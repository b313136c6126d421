"""Sites check their tables before the first round, and sums alone prepare the rows: as a simulation prepares them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedauc.cli.federation import describe_summary
from fedauc.data.clients import Clients
from fedauc.data.feature_fitting import FeatureSettings, RawColumn, fit_features
from fedauc.experiments.assembly import assemble_training
from fedauc.federation.column_sums import SUM_FIELDS, pack_sums, read_sums, sum_columns
from fedauc.federation.data_agreement import warn_of_units
from fedauc.federation.registration import _read_registration
from fedauc.federation.schema import DataSchema, SchemaColumn, check_table
from fedauc.federation.serialization import pack_payload
from fedauc.federation.server import FederatedRun, summarize_run
from fedauc.federation.site import SitePolicy
from fedauc.federation.site_data import split_rows
from fedauc.guards import TrainingStopped
from fedauc.models.linear import Linear
from fedauc.reports.report_runs import read_report_runs
from fedauc.reports.sentences import describe_privacy
from federation.hospital_tables import (
    HOSPITALS,
    SCHEMA,
    make_hospital,
    make_hospital_agreement,
    make_hospital_sites,
    make_hospitals,
    start_hospital_run,
)


def read_weights(run: FederatedRun) -> np.ndarray:
    run.train_to_end()
    with np.load(run.folder.path / "model.npz") as arrays:
        return np.concatenate([arrays[name].reshape(-1) for name in arrays.files])


def list_training_rows(labels: np.ndarray, validation_fraction: float) -> np.ndarray:
    """The rows of one table that are neither test nor validation rows."""
    train, _ = split_rows(labels, 0.3)
    kept: np.ndarray = train[split_rows(labels[train], validation_fraction, "validation")[0]]
    return kept


def simulate_hospitals(tables: dict[str, pd.DataFrame], validation_fraction: float) -> tuple[Any, np.ndarray]:
    """The same rows in one place: features fitted over all training rows with their sites, then the loop engine."""
    frame = pd.concat(tables.values(), ignore_index=True)
    checked, _ = check_table(frame, SCHEMA)
    assert checked is not None
    ends = np.cumsum([len(table) for table in tables.values()])
    starts = [(end - 120, checked.labels[end - 120 : end]) for end in ends.tolist()]
    train = np.concatenate([list_training_rows(labels, validation_fraction) + start for start, labels in starts])
    site = np.searchsorted(ends, train, side="right")
    columns = [column._replace(values=column.values[train]) for column in checked.columns]
    # An agreed vocabulary takes every category, however rare.
    fitted = fit_features(columns, FeatureSettings(), site, len(tables))
    inputs, names = fitted.encoder.encode(frame), np.array(list(HOSPITALS))
    groups = np.array(list(HOSPITALS.values()))
    clients = Clients.from_arrays(inputs[train], checked.labels[train], names[site], groups[site])
    recipe = make_hospital_agreement().recipe
    training, _, state = assemble_training(recipe, Linear().build(inputs.shape[1:], recipe.seed), clients)
    *_, last = training.rounds(state)
    return fitted, np.asarray(recipe.algorithm.extract_model(last.state.server.shared).weights)


@pytest.mark.parametrize("validation_fraction", [0.0, 0.25])
def test_the_preparation_and_the_model_are_the_simulators(validation_fraction: float, tmp_path: Path) -> None:
    """Validation rows of a federation take no part in the sums, as those of a simulation take none."""
    tables, agreement = make_hospitals(), make_hospital_agreement(validation_fraction=validation_fraction)
    run = start_hospital_run(make_hospital_sites(tables, tmp_path / "sites"), tmp_path / "run", agreement)
    weights = read_weights(run)
    fitted, expected = simulate_hospitals(tables, validation_fraction)
    stored = json.loads((tmp_path / "run" / "census.json").read_text())["preparation"]
    assert stored["encoder"] == json.loads(json.dumps(fitted.encoder.to_document()))
    assert np.array_equal(weights, expected)


def test_permuted_columns_give_the_same_bits(tmp_path: Path) -> None:
    tables = make_hospitals()
    run = start_hospital_run(make_hospital_sites(tables, tmp_path / "sites"), tmp_path / "run")
    tables["south"] = tables["south"][["died", "ward", "temperature", "sex", "age"]]
    permuted = start_hospital_run(make_hospital_sites(tables, tmp_path / "permuted"), tmp_path / "again")
    assert np.array_equal(read_weights(run), read_weights(permuted))


def test_the_ledger_counts_the_sums(tmp_path: Path) -> None:
    """Each of three sites sends four numbers of age and temperature, and of ward three and the counts of a, b and c.

    It receives two numbers per column, and the vocabulary with a byte between two values.
    """
    run = start_hospital_run(make_hospital_sites(make_hospitals(), tmp_path / "sites"), tmp_path / "run")
    traffic = run.folder.rewind_to_checkpoint("cpu").ledger.traffic
    assert traffic.floats_up == 3 * (2 * SUM_FIELDS + 3 + 3)
    assert traffic.bytes_up == 8 * traffic.floats_up + 3 * len("abc")
    assert traffic.floats_down == 3 * 2 * 4
    assert traffic.bytes_down == 8 * traffic.floats_down + 3 * len("f m a b c ")
    run.train_to_end()
    resumed = json.loads((tmp_path / "run" / "records.jsonl").read_text().splitlines()[-1])
    assert resumed["bytes_up"] > traffic.bytes_up


@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            lambda table: table.rename(columns={"age": "years"}),
            "column 'age' is missing, and there is a column 'years'",
        ),
        (lambda table: table.assign(died=np.where(table["died"] == "yes", 2, 1)), "label column 'died' holds values"),
        (lambda table: table.assign(age=table["age"] + 100), "column 'age' holds values outside 0 to 120 years"),
    ],
)
def test_a_site_that_differs_is_named_and_the_run_stops_or_goes_on(
    change: Any, rule: str, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = make_hospitals()
    tables["west"] = change(tables["west"])
    sites = make_hospital_sites(tables, tmp_path / "sites")
    agreement = make_hospital_agreement(on_site_failure=policy)
    if policy == "stop":
        with pytest.raises(TrainingStopped, match=f"^site 'west': {rule}.*on-site-failure") as caught:
            start_hospital_run(sites, tmp_path / "run", agreement)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
        return
    run = start_hospital_run(sites, tmp_path / "run", agreement)
    assert f"site 'west': {rule}" in caplog.text
    result = run.train_to_end()
    assert result["attendance"]["west"]["answered"] == 0
    assert result["attendance"]["north"]["answered"] > 0
    (line,) = [line for line in describe_summary(summarize_run(tmp_path / "run")) if line.startswith("west:")]
    assert line.startswith(f"west: takes no part in the run: the site reports: site 'west': {rule}")


def test_the_only_site_of_a_group_that_fails_is_named(tmp_path: Path) -> None:
    tables = make_hospitals()
    tables["south"] = tables["south"].rename(columns={"age": "years"})
    sites = make_hospital_sites(tables, tmp_path / "sites")
    with pytest.raises(ValueError, match=r"group 'night' has no client with data.*; site 'south': .*column 'age' is"):
        start_hospital_run(sites, tmp_path / "run", make_hospital_agreement(on_site_failure="continue"))


def test_swapped_labels_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = make_hospitals()
    for name, table in tables.items():
        rare = np.arange(len(table)) % 10 == 0
        tables[name] = table.assign(died=np.where(rare != (name == "south"), "yes", "no"))
    start_hospital_run(make_hospital_sites(tables, tmp_path / "sites"), tmp_path / "run")
    assert "site 'south' has 90 % positives, and the median site 10 %; are its labels swapped?" in caplog.text
    assert caplog.text.count("are its labels swapped") == 1


def test_a_column_in_other_units_is_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = make_hospitals()
    tables["south"] = tables["south"].assign(temperature=tables["south"]["temperature"] * 1.8 + 32)
    start_hospital_run(make_hospital_sites(tables, tmp_path / "sites"), tmp_path / "run")
    (warning,) = summarize_run(tmp_path / "run")["warnings"]
    assert warning.startswith("column 'temperature' has mean 98.")
    assert "at site 'south'" in warning
    assert warning.endswith("are both in C?")
    assert warning in caplog.text


def test_two_sites_are_compared_with_each_other(tmp_path: Path) -> None:
    """Pounds for kilograms: with two sites nobody knows whose units are wrong, so that both are named."""
    schema = DataSchema(columns=(SchemaColumn("weight", unit="kg"),))
    random = np.random.default_rng(0)
    weights = {"north": 70 + 15 * random.normal(size=200), "south": (70 + 15 * random.normal(size=200)) * 2.2046}
    sums = {}
    for name, values in weights.items():
        checked, _ = check_table(pd.DataFrame({"weight": values, "y": [0, 1] * 100}), schema)
        assert checked is not None
        sums[name] = sum_columns(checked.columns, schema, 1).numbers
    (warning,) = warn_of_units(schema, sums)
    assert "at site 'north' and" in warning
    assert "at site 'south'" in warning
    sums["south"] = sums["north"]
    assert warn_of_units(schema, sums) == []


def test_a_site_that_shares_no_sums_takes_part_where_the_schema_has_all_numbers(tmp_path: Path) -> None:
    closed = SitePolicy(share_sums=False)
    sites = make_hospital_sites(make_hospitals(), tmp_path / "sites", closed)
    with pytest.raises(TrainingStopped, match=r"^site 'north': this site shares no sums of columns; .*'age'"):
        start_hospital_run(sites, tmp_path / "run")
    columns = [
        replace(column, categories=column.categories or ("a", "b", "c"))
        if column.kind == "category"
        else replace(column, center=40.0, scale=10.0)
        for column in SCHEMA.columns
    ]
    agreed = make_hospital_agreement(replace(SCHEMA, columns=tuple(columns)))
    run = start_hospital_run(sites, tmp_path / "run", agreed)
    assert run.train_to_end()["final"]["auc"] > 0.8
    assert json.loads((tmp_path / "run" / "census.json").read_text())["preparation"]["traffic"][1] == 0


def test_nothing_is_reported_of_fewer_rows_than_the_policy_asks_for() -> None:
    table = make_hospital(3, 40)
    table.loc[5:, "temperature"] = np.nan
    table["ward"] = ["rare", *["second"] * 15, *["common"] * 24]
    checked, _ = check_table(table, SCHEMA)
    assert checked is not None
    sums = sum_columns(checked.columns, SCHEMA, 10)
    header, tensors = pack_sums(sums)
    read = read_sums(pack_payload(header, tensors), SCHEMA)
    assert read.numbers["temperature"].counts[0] == 0
    assert read.numbers["age"].counts[0] == 40
    assert "rare" not in json.dumps(header)
    # Of 40 rows, 24 and 15 with a name would leave one without.
    assert read.categories["ward"].counts.tolist() == [24]
    # Neither the smallest nor the largest age is sent.
    sent = set(torch.cat([tensors["sums"].reshape(-1)]).tolist())
    assert not sent & {float(table["age"].min()), float(table["age"].max())}


def test_no_sum_shows_how_few_rows_differ_from_the_others() -> None:
    """Of 100 rows, one has the flag, one a time of day, one no date, one a code; the server knows the 100."""
    columns = (
        SchemaColumn("flag", "boolean"),
        SchemaColumn("day", "date", missing=True),
        SchemaColumn("often", "boolean"),
        SchemaColumn("code", "category", missing=True),
    )
    schema = DataSchema(columns=columns, label="y")
    number, rows = np.arange(100), 100
    days = np.where(number == 7, 1.25, number % 5.0)
    days[9] = np.nan
    raw = [
        RawColumn("flag", "boolean", (number == 3).astype(float)),
        RawColumn("day", "date", days),
        RawColumn("often", "boolean", (number < 30).astype(float)),
        RawColumn("code", "category", np.where(number == 0, 0, -1), ("hiv",)),
    ]
    sums = sum_columns(raw, schema, 10)
    assert [int(sums.numbers[name].counts[0]) for name in ("flag", "day", "often")] == [0, rows, rows]
    assert int(sums.numbers["day"].missing[0]) == 0
    assert sums.with_times == ()
    assert sums.categories["code"].counts.tolist() == []
    assert sum_columns(raw, schema, 1).with_times == ("day",)
    assert sum_columns(raw, schema, 1).numbers["flag"].mean[0] == pytest.approx(0.01)
    # A column of dates with few values tells nothing of them either.
    few = [raw[1]._replace(values=np.where(number < 5, 1.25, np.nan))]
    assert sum_columns(few, schema, 10).with_times == ()


def test_a_column_of_equal_values_is_left_out_at_every_site(tmp_path: Path) -> None:
    """Its mean over many rows is not exactly 0.1, and must not look like a tiny deviation."""
    schema = replace(SCHEMA, columns=(*SCHEMA.columns, SchemaColumn("dose")))
    tables = {
        name: table.assign(dose=0.1)[: 120 - 7 * index] for index, (name, table) in enumerate(make_hospitals().items())
    }
    sites = make_hospital_sites(tables, tmp_path / "sites")
    start_hospital_run(sites, tmp_path / "run", make_hospital_agreement(schema))
    assert summarize_run(tmp_path / "run")["warnings"] == [
        "column 'dose' is left out: all training rows have the same value, 0.1"
    ]


@pytest.mark.parametrize("kind", ["nan", "negative", "names"])
def test_sums_that_cannot_be_are_refused(kind: str) -> None:
    checked, _ = check_table(make_hospital(4), SCHEMA)
    assert checked is not None
    header, tensors = pack_sums(sum_columns(checked.columns, SCHEMA, 1))
    if kind == "names":
        header["numbers"] = ["temperature", "age"]
    else:
        tensors["sums"][0, 0] = torch.nan if kind == "nan" else -1.0
    with pytest.raises(ValueError, match="its sums are not"):
        read_sums(pack_payload(header, tensors), SCHEMA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1e300, 0.0, 50.0, 1.0), "whole numbers of rows up to 1e+12"),
        ((119.5, 0.5, 50.0, 1.0), "whole numbers of rows up to 1e+12"),
        ((1e11, 0.0, 50.0, 1.0), "different numbers of rows"),
        ((120.0, 0.0, 1e30, 1.0), "mean of column 'age' is outside the agreed range"),
        ((120.0, 0.0, 50.0, 1e12), "deviations of column 'age' are too large for the agreed range"),
    ],
)
def test_sums_that_would_spoil_the_preparation_of_all_sites_are_refused(
    values: tuple[float, ...], message: str
) -> None:
    """Rows with a value, rows without, mean and squared deviations of the age, which is 0 to 120 years."""
    checked, _ = check_table(make_hospital(4), SCHEMA)
    assert checked is not None
    header, tensors = pack_sums(sum_columns(checked.columns, SCHEMA, 1))
    assert header["numbers"][0] == "age"
    read_sums(pack_payload(header, tensors), SCHEMA)
    tensors["sums"][0] = torch.tensor(values, dtype=torch.float64)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_sums(pack_payload(header, tensors), SCHEMA)


@pytest.mark.parametrize(
    ("rows", "message"), [([10**30, 0, False], "are not counts up to 1e+12"), ([1, 0, False], "more than its 1 rows")]
)
def test_counts_of_categories_that_cannot_be_are_refused(rows: list[Any], message: str) -> None:
    checked, _ = check_table(make_hospital(4), SCHEMA)
    assert checked is not None
    header, tensors = pack_sums(sum_columns(checked.columns, SCHEMA, 1))
    header["categories"][0]["rows"] = rows
    with pytest.raises(ValueError, match=re.escape(message)):
        read_sums(pack_payload(header, tensors), SCHEMA)


def test_a_site_whose_sums_are_of_other_rows_than_it_registers_is_refused() -> None:
    payload = pack_payload({"kind": "register", "shape": [3], "dtype": "float", "class_counts": [20, 100]})
    assert sum(_read_registration(payload, False, False, 0.0, 120).class_counts) == 120
    with pytest.raises(ValueError, match="but the sums that it has sent are of 1000 rows"):
        _read_registration(payload, False, False, 0.0, 1000)


def test_a_changed_file_is_prepared_again(tmp_path: Path) -> None:
    """The site's cache belongs to the version of the file that it was made from."""
    tables = make_hospitals()
    sites = make_hospital_sites(tables, tmp_path / "sites")
    run = start_hospital_run(sites, tmp_path / "run")
    tables["west"][:60].to_csv(tmp_path / "sites" / "west" / "rows.csv", index=False)
    result = run.train_to_end()
    assert result["attendance"]["west"]["refused"] > 0
    assert result["attendance"]["west"]["answered"] == 0


def test_the_report_names_the_sums_of_columns_and_no_extremes(tmp_path: Path) -> None:
    start_hospital_run(make_hospital_sites(make_hospitals(), tmp_path / "sites"), tmp_path / "run").train_to_end()
    (run,) = read_report_runs([tmp_path / "run"])
    assert run.preparation is not None
    assert run.preparation.bytes_up > 0
    lines = dict(describe_privacy(run))
    assert "the mean, and the sum of squared deviations. " in lines["Once, at the start"]
    assert "categories that the schema does not list" in lines["Once, at the start"]
    assert "the smallest" not in lines["Once, at the start"]
    assert lines["At the end"].startswith("Nothing: ")
    assert "a category is named which enough rows have" in lines["Never"]
