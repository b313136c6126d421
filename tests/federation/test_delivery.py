"""Every site ends with the run's model, its preparation, thresholds of its own and a card; hashes say it is the one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedauc as package
from cli_helpers import fedauc
from fedauc.cli.federation import describe_summary
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.manifest import compare_with_manifest
from fedauc.federation.delivery import hash_tensors, verify_model
from fedauc.federation.exchange import Exchange
from fedauc.federation.in_process import AnsweringSite, InProcessGrid
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.server import FederatedRun, summarize_run
from fedauc.federation.site_control import ControlledSite
from fedauc.scoring.model_card import update_model_card
from federation.hospital_tables import (
    HOSPITALS,
    SCHEMA,
    make_controlled_sites,
    make_hospital,
    make_hospital_agreement,
    start_hospital_run,
)


def find_model(folder: Path, name: str) -> Path:
    (model,) = (folder / name / "state" / "models").iterdir()
    return model


def test_every_site_has_the_model_and_scores_raw_rows_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run").train_to_end()
    delivery = json.loads((tmp_path / "run" / "delivery.json").read_text())
    assert delivery["sites"] == dict.fromkeys(HOSPITALS, "delivered")
    rows = make_hospital(9)
    rows[["sex", "died", "age", "ward", "temperature"]].to_csv(tmp_path / "new.csv", index=False)
    with np.load(tmp_path / "run" / "model.npz") as arrays:
        server = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    assert hash_tensors(server) == delivery["sha256"]
    scores = []
    for name in HOSPITALS:
        folder = find_model(tmp_path / "sites", name)
        assert verify_model(folder) == []
        card = (folder / "MODEL_CARD.md").read_text()
        assert "AUC, this site's held-out rows" in card
        assert "simulated" not in card
        out = tmp_path / f"{name}.csv"
        done = fedauc(capsys, "predict", str(folder), str(tmp_path / "new.csv"), "--label", "died", "--out", str(out))
        assert done.code == 0, done.err
        scores.append(pd.read_csv(out)["score"].to_numpy())
    # The model is the same everywhere; thresholds and calibration are each site's own.
    assert np.array_equal(scores[0], scores[1])
    assert np.array_equal(scores[0], scores[2])
    thresholds = {package.load(find_model(tmp_path / "sites", name)).operating_point.threshold for name in HOSPITALS}
    assert len(thresholds) > 1
    shown = fedauc(capsys, "federation", "show", str(tmp_path / "run"))
    assert "model delivered to 3 of 3 sites" in shown.out


def test_values_outside_the_agreed_ranges_are_named_when_rows_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A body temperature in Fahrenheit is not a hundred standard deviations away."""
    columns = [
        dataclasses.replace(column, minimum=25.0, maximum=45.0) if column.name == "temperature" else column
        for column in SCHEMA.columns
    ]
    agreement = make_hospital_agreement(dataclasses.replace(SCHEMA, columns=tuple(columns)))
    start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run", agreement).train_to_end()
    folder = find_model(tmp_path / "sites", "north")
    rows = make_hospital(9)
    for name, temperature in (("celsius", rows["temperature"]), ("fahrenheit", 32 + 1.8 * rows["temperature"])):
        rows.assign(temperature=temperature).to_csv(tmp_path / f"{name}.csv", index=False)
        caplog.clear()
        done = fedauc(capsys, "predict", str(folder), str(tmp_path / f"{name}.csv"), "--out", str(tmp_path / "out.csv"))
        assert done.code == 0, done.err
        known = int(temperature.notna().sum())
        warning = (
            f"column 'temperature' is outside its agreed range, 25 to 45 C, in {known} of 120 rows; check its unit"
        )
        assert (warning in caplog.text) == (name == "fahrenheit")
        assert "'age' is outside" not in caplog.text


def test_the_card_of_a_site_says_that_its_own_rows_were_used(tmp_path: Path) -> None:
    agreement = make_hospital_agreement(validation_fraction=0.2)
    start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run", agreement).train_to_end()
    folder = find_model(tmp_path / "sites", "north")
    # Choosing another threshold keeps what the card says.
    scorer = package.load(folder)
    update_model_card(folder, scorer)
    card = (folder / "MODEL_CARD.md").read_text()
    assert "Platt scaling of the site's training rows. Training rows are fitted better than new ones" in card
    assert "no validation rows" not in card
    assert f"| saved after round | `{json.loads((folder / 'delivery.json').read_text())['round'] + 1}` |" in card
    assert "added up" not in card
    assert describe_summary(summarize_run(tmp_path / "run"))[0] == "done, 4 of 4 rounds: 2 cycles of 2"


def test_a_site_with_one_class_is_told_why_it_gets_no_model(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites")
    rows = tmp_path / "sites" / "west" / "rows.csv"
    pd.read_csv(rows).assign(died="no").to_csv(rows, index=False)
    start_hospital_run(sites, tmp_path / "run").train_to_end()
    status = summarize_run(tmp_path / "run")["delivery"]
    assert status["west"].endswith("a threshold needs rows of both classes to train on, which this site has not")
    assert status["north"] == "delivered"


def test_a_site_that_was_offline_receives_the_model_later(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites")
    agreement = make_hospital_agreement(deadline=0.05, registration_deadline=30.0)
    run = start_hospital_run(sites, tmp_path / "run", agreement)
    without_west = {name: site for name, site in sites.items() if name != "west"}
    exchange = Exchange(InProcessGrid(without_west), agreement.sites, agreement.policy)
    FederatedRun.resume(exchange, RunFolder(tmp_path / "run")).train_to_end()
    assert summarize_run(tmp_path / "run")["delivery"]["west"] == "is offline"
    exchange = Exchange(InProcessGrid(sites), agreement.sites, agreement.policy)
    FederatedRun.resume(exchange, run.folder).train_to_end()
    assert summarize_run(tmp_path / "run")["delivery"] == dict.fromkeys(HOSPITALS, "delivered")
    north, west = (find_model(tmp_path / "sites", name) for name in ("north", "west"))
    hashes = {json.loads((folder / "delivery.json").read_text())["sha256"] for folder in (north, west)}
    assert len(hashes) == 1
    # What was written after the end is in the manifest, too.
    assert compare_with_manifest(tmp_path / "run") == ((), (), ())


def test_what_a_killed_process_left_of_a_model_does_not_stay(tmp_path: Path) -> None:
    run = start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run")
    run_id = json.loads((tmp_path / "run" / "census.json").read_text())["run"]
    part = tmp_path / "sites" / "west" / "state" / "models" / f".{run_id}.part"
    part.mkdir(parents=True)
    (part / "model.pt").write_bytes(b"half")
    run.train_to_end()
    assert verify_model(find_model(tmp_path / "sites", "west")) == []
    assert not part.exists()


class TamperedSite:
    """A network that changes one weight of the delivered model on its way."""

    def __init__(self, site: ControlledSite) -> None:
        self._site = site

    def answer_message(self, payload: Payload) -> Payload:
        header = payload.read_header()
        if header["kind"] == "deliver":
            weights, *rest = unpack_tensors(payload)["model"]
            weights[0] += 1
            header.pop("layouts")
            payload = pack_payload(header, {"model": (weights, *rest)})
        return self._site.answer_message(payload)


def test_a_model_that_was_changed_on_its_way_is_refused(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites")
    changed: dict[str, AnsweringSite] = {**sites, "south": TamperedSite(sites["south"])}
    start_hospital_run(changed, tmp_path / "run").train_to_end()
    status = summarize_run(tmp_path / "run")["delivery"]
    assert "the model has the hash" in status["south"]
    assert status["north"] == "delivered"
    assert not (tmp_path / "sites" / "south" / "state" / "models").exists()


def test_a_file_that_was_changed_at_the_site_is_named(tmp_path: Path) -> None:
    start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run").train_to_end()
    folder = find_model(tmp_path / "sites", "north")
    with (folder / "MODEL_CARD.md").open("a") as file:
        file.write("perfect")
    assert verify_model(folder) == ["MODEL_CARD.md"]
    (folder / "model.pt").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"model\.pt is not the file"):
        verify_model(folder)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"sha256": "a", "files": 3}'])
def test_a_damaged_list_of_files_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "delivery.json").write_text(content)
    with pytest.raises(ValueError, match=r"delivery.json is damaged .*; resume the run to get the model again"):
        verify_model(tmp_path)


def test_the_hash_depends_on_names_types_shapes_and_bytes() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.zeros(0)}
    same = {"b": torch.zeros(0), "a": torch.arange(4.0)}
    assert hash_tensors(tensors) == hash_tensors(same)
    for changed in (
        {**tensors, "a": torch.arange(4.0).reshape(2, 2)},
        {**tensors, "a": torch.arange(4.0).double()},
        {**tensors, "a": torch.arange(4.0) + 1e-7},
        {"c": tensors["a"], "b": tensors["b"]},
    ):
        assert hash_tensors(changed) != hash_tensors(tensors)
