"""Tables of small hospitals whose columns have the same meaning, and federations of them in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedauc.experiments.recipe import Recipe
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry
from fedauc.federation.exchange import Exchange
from fedauc.federation.in_process import AnsweringSite, InProcessGrid
from fedauc.federation.schema import DataSchema, SchemaColumn
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import DEFAULT_POLICY, Site, SitePolicy
from fedauc.federation.site_control import ControlledSite, open_controlled_site
from fedauc.federation.site_state import FolderSiteState
from fedauc.federation.site_table import SiteTable

HOSPITALS = {"north": "day", "south": "night", "west": "day"}
"""Names and groups."""

SCHEMA = DataSchema(
    columns=(
        SchemaColumn("age", unit="years", minimum=0, maximum=120),
        SchemaColumn("temperature", unit="C", missing=True),
        SchemaColumn("sex", "category", categories=("f", "m")),
        SchemaColumn("ward", "category"),
    ),
    label="died",
    negative="no",
    positive="yes",
    ignored=("patient",),
)


def make_hospital(seed: int, rows: int = 120) -> pd.DataFrame:
    """A hospital's table: old patients with a fever die more often."""
    random = np.random.default_rng(seed)
    age, temperature = random.integers(20, 95, rows), 37 + random.normal(0, 0.8, rows)
    risk = (age - 60) / 15 + (temperature - 37) / 0.8 + random.normal(0, 0.7, rows)
    temperature[random.random(rows) < 0.05] = np.nan
    return pd.DataFrame(
        {
            "age": age,
            "temperature": temperature.round(2),
            "sex": random.choice(["f", "m"], rows),
            "ward": random.choice(["a", "b", "c"], rows),
            "died": np.where(risk > 0.8, "yes", "no"),
        }
    )


def make_hospitals() -> dict[str, pd.DataFrame]:
    """One table for each of the hospitals."""
    return {name: make_hospital(seed) for seed, name in enumerate(HOSPITALS)}


def make_hospital_sites(
    tables: Mapping[str, pd.DataFrame], folder: Path, policy: SitePolicy = DEFAULT_POLICY
) -> dict[str, Site]:
    """Sites that read their tables from CSV files."""
    sites = {}
    for name, table in tables.items():
        home = folder / name
        home.mkdir(parents=True)
        table.to_csv(home / "rows.csv", index=False)
        source = SiteTable.from_file(home / "rows.csv", home / "cache")
        sites[name] = Site(
            lambda source=source: source,  # type: ignore[misc]
            lambda run, home=home: FolderSiteState(home / "state" / run),  # type: ignore[misc]
            policy,
        )
    return sites


def make_controlled_sites(folder: Path, policy: str = "") -> dict[str, ControlledSite]:
    """The hospitals' sites with their folders and one policy."""
    sites = {}
    for name, table in make_hospitals().items():
        home = folder / name
        home.mkdir(parents=True)
        table.to_csv(home / "rows.csv", index=False)
        config = {"state": str(home / "state")}
        if policy:
            (home / "policy.toml").write_text(policy)
            config["policy"] = str(home / "policy.toml")
        source = SiteTable.from_file(home / "rows.csv", home / "state" / "rows")
        sites[name] = open_controlled_site(config, lambda source=source: source)  # type: ignore[misc]
    return sites


def make_hospital_agreement(schema: DataSchema | None = SCHEMA, **changes: Any) -> FederationAgreement:
    """CyCp-Minimax for two cycles; `changes` are of the server's policy."""
    recipe = Recipe.of("cycp-minimax", engine="loop", cycles=2, learning_rate=0.1, positives=8, negatives=8)
    sites = tuple(SiteEntry(name, group) for name, group in HOSPITALS.items())
    return FederationAgreement(
        recipe=recipe, sites=sites, policy=ServerPolicy(poll_interval=0.001, **changes), schema=schema
    )


def start_hospital_run(
    sites: Mapping[str, AnsweringSite], out: Path, agreement: FederationAgreement | None = None
) -> FederatedRun:
    """A run over these sites that is ready to be trained."""
    agreement = agreement or make_hospital_agreement()
    exchange = Exchange(InProcessGrid(sites), agreement.sites, agreement.policy)
    return FederatedRun.create(agreement, exchange, out)
