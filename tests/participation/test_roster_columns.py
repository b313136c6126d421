"""What is known about clients besides their rows, such as a time zone, reaches the schedule from every source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest

from fedauc.data.clients import Clients
from fedauc.data.datasets.table import Table
from fedauc.data.io import disk_tables
from fedauc.data.partitions import IID
from fedauc.data.preparation import Preparation, prepare_table
from fedauc.experiments.config import Config
from fedauc.experiments.options import build_config
from fedauc.federation.agreement import FederationAgreement, read_sites
from fedauc.federation.server import FederatedRun
from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation._common import make_cohort
from fedauc.participation.cyclic import Cyclic
from federation.memory_grid import NAMES, make_agreement, make_exchange, make_grid
from small_federations import EMPTY, run_rounds, small_federation, small_recipe

ZONES = {"ann": 9, "bob": -5, "cyd": 9, "dan": 0}
ROWS = [name for name in ZONES for _ in range(10)]


def make_frame() -> pd.DataFrame:
    """Ten rows of each of four clients, three of them positive."""
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "x": draw.normal(size=40),
            "y": np.arange(40) % 3 == 0,
            "client": ROWS,
            "timezone": [ZONES[name] for name in ROWS],
            "region": [f"r{abs(ZONES[name])}" for name in ROWS],
        }
    )


@dataclass(frozen=True)
class Daylight(Participation):
    """A day has eight rounds of three hours; a client takes part while it is between 9 and 21 o'clock at its place."""

    name: ClassVar[str] = "daylight"

    def bind(self, clients: Roster, seed: int) -> Schedule:
        return DaylightSchedule(clients)


class DaylightSchedule(Schedule):
    cycle_length = 8

    def __init__(self, clients: Roster) -> None:
        self.groups = [np.flatnonzero(clients.sizes > 0)]
        self._zones = clients.columns["timezone"]

    def cohort(self, round: int) -> Cohort:
        local_hours = (3 * round + self._zones[self.groups[0]]) % 24
        return make_cohort(round, self.groups[0][(local_hours >= 9) & (local_hours < 21)])


def test_columns_are_one_value_per_client_in_the_order_of_their_names() -> None:
    frame = make_frame()
    by_name = {name: frame[name].to_numpy() for name in ("timezone", "region")}
    arrays = Clients.from_arrays(frame[["x"]].to_numpy(), frame["y"], frame["client"], columns=by_name)
    frames = Clients.from_frame(frame, "y", "client", columns=["timezone", "region"])
    for clients in (arrays, frames):
        assert clients.names.tolist() == ["ann", "bob", "cyd", "dan"]
        assert clients.roster.columns["timezone"].tolist() == [9, -5, 9, 0]
        assert clients.roster.columns["region"].tolist() == ["r9", "r5", "r9", "r0"]
        assert clients.inputs.shape == (40, 1)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
@pytest.mark.parametrize("large", [False, True])
def test_a_file_describes_its_clients(
    suffix: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, frame = tmp_path / f"rows{suffix}", make_frame()
    monkeypatch.setenv("FEDAUC_DATA", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr(disk_tables, "LARGE", 1)
    if suffix == ".npz":
        inputs, client = frame[["x"]].to_numpy(), frame["client"].to_numpy(dtype=str)
        np.savez(path, x=inputs, y=frame["y"].to_numpy(), client=client, timezone=frame["timezone"].to_numpy())
    elif suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    data = Table(path=str(path), roster_columns=("timezone",))
    table = data.load(0)
    # The time zone is no feature. The region has inputs for r9 and for the others, which have fewer than ten rows.
    assert table.train.inputs.shape[1] == (1 if suffix == ".npz" else 3)
    clients = prepare_table(table, Preparation(), 0).train
    assert clients.columns["timezone"].tolist() == [ZONES[str(name)] for name in clients.names]
    loaded = Clients.from_file(str(path), "y", "client", columns=["timezone"])
    assert loaded.columns["timezone"].tolist() == [9, -5, 9, 0]


def test_a_client_with_two_values_is_refused(tmp_path: Path) -> None:
    frame = make_frame()
    frame.loc[5, "timezone"] = 1
    message = "client 'ann' has timezone 9 and 1; give all rows of a client the same timezone"
    with pytest.raises(ValueError, match=message):
        Clients.from_frame(frame, "y", "client", columns=["timezone"])
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ValueError, match=f"rows.csv': {message}"):
        Table(path=str(tmp_path / "rows.csv"), roster_columns=("timezone",)).load(0)
    with pytest.raises(ValueError, match="column 'timezone' is missing in 1 rows, the first row 3"):
        Clients.from_arrays([[0.0]] * 4, [0, 1, 0, 1], list("aabb"), columns={"timezone": ["u", "u", "v", None]})


def test_clients_of_another_partition_have_no_columns(tmp_path: Path) -> None:
    make_frame().to_csv(tmp_path / "rows.csv", index=False)
    table = Table(path=str(tmp_path / "rows.csv"), roster_columns=("timezone",)).load(0)
    with pytest.raises(ValueError, match="partition 'iid' makes others: use partition 'natural'"):
        prepare_table(table, Preparation(partition=IID(clients=3)), 0)


def test_a_schedule_follows_the_sun() -> None:
    zones = np.array([9, -5, 9, 0, 9, -5, 0, 0])
    clients = replace(small_federation(), columns={"timezone": zones})
    recipe = replace(small_recipe("cycp-fedavg", cycles=1), participation=Daylight())
    cohorts = [finished.cohort.clients for finished in run_rounds(recipe, clients=clients)]
    # At 0 o'clock it is 9 in zone 9, 19 in zone -5 and 0 in zone 0; client 2 has no rows.
    assert cohorts[0] == tuple(client for client in range(8) if zones[client] != 0 and client != EMPTY)
    assert cohorts[3] == tuple(client for client in range(8) if zones[client] != -5 and client != EMPTY)
    assert len(cohorts) == 8


def test_cyclic_groups_by_a_column_in_the_order_of_its_values() -> None:
    roster = Roster(np.full(4, 5), columns={"timezone": np.array([9, -5, 9, 0])})
    schedule = Cyclic(group_column="timezone").bind(roster, seed=0)
    assert [schedule.cohort(round).clients for round in range(3)] == [(1,), (3,), (0, 2)]
    with pytest.raises(ValueError, match="unknown column 'zone': did you mean 'timezone'"):
        Cyclic(group_column="zone").bind(roster, seed=0)
    remedy = r"use --data.roster-columns zone, or Clients.from_arrays\(..., columns=\{'zone': ...\}\)"
    with pytest.raises(ValueError, match=f"known: timezone; to give the clients another column, {remedy}"):
        Cyclic(group_column="zone").bind(roster, seed=0)
    message = f"group_column is 'zone', but the clients have no columns; to give them this one, {remedy}"
    with pytest.raises(ValueError, match=message):
        Cyclic(group_column="zone", groups=2).bind(Roster(np.full(4, 5)), seed=0)
    message = "groups is 2; the column 'timezone' has 3 different values.*: leave out groups, or leave out group_column"
    with pytest.raises(ValueError, match=message):
        Cyclic(group_column="timezone", groups=2).bind(roster, seed=0)
    with pytest.raises(ValueError, match="group_column is 'timezone' but assignment is 'random': drop either"):
        Cyclic(group_column="timezone", assignment="random")


def test_the_command_lines_options_reach_the_schedule(tmp_path: Path) -> None:
    make_frame().to_csv(tmp_path / "rows.csv", index=False)
    texts = {"data": "table", "data.path": str(tmp_path / "rows.csv"), "data.roster-columns": "timezone,region"}
    config = build_config(None, None, texts | {"participation.group-column": "timezone"})
    assert config.data == Table(path=texts["data.path"], roster_columns=("timezone", "region"))
    assert Config.from_json(config.to_json()) == config
    clients = prepare_table(config.data.load(0), config.preparation, 0).train
    assert config.recipe.participation.bind(clients.roster, 0).cycle_length == 3


def test_sites_have_columns_too(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    sections = [f'[{name}]\ngroup = "g"\ncolumns = {{timezone = {index % 2}}}' for index, name in enumerate(NAMES)]
    path.write_text("\n".join(sections))
    sites = read_sites(path)
    assert [site.columns for site in sites] == [(("timezone", str(index % 2)),) for index in range(len(NAMES))]
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, participation=Cyclic(group_column="timezone"))
    keys: dict[str, Any] = {site.name: site.key for site in agreement.sites}
    agreement = replace(agreement, sites=tuple(replace(site, key=keys[site.name]) for site in sites))
    (tmp_path / "federation.json").write_text(agreement.to_json())
    assert FederationAgreement.read_json(tmp_path / "federation.json") == agreement
    run = FederatedRun.create(agreement, make_exchange(make_grid(tmp_path / "sites"), agreement), tmp_path / "run")
    assert run.loop.training.schedule.cohort(0).clients == (0, 4, 6)
    with pytest.raises(
        ValueError, match=r"has columns \['timezone'\], site 'site-0' has \[\]; give every site the same"
    ):
        replace(agreement, sites=(replace(sites[0], columns=()), *sites[1:]))
