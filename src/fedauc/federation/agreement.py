"""What a federation has agreed on: which sites belong to it, what is trained, and how the server treats the sites."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fedauc.experiments.callbacks import Callback, choose_callbacks
from fedauc.experiments.config import from_plain, to_plain
from fedauc.experiments.plugin_use import import_used_plugins, list_used_plugins
from fedauc.experiments.private_training import find_client_dp
from fedauc.experiments.recipe import Recipe
from fedauc.federation.deadlines import check_deadline_groups, read_group_deadlines
from fedauc.federation.schema import DataSchema
from fedauc.federation.toml_files import read_toml_file
from fedauc.fields import check_fields, option
from fedauc.models.linear import Linear
from fedauc.models.model import ModelConfig

AGREEMENT_FORMAT = 1
"""Version of federation.json. It is raised when an old reader could misunderstand a new file."""


@dataclass(frozen=True)
class SiteEntry:
    """A row of the server's site table: registered name, group, and public key (empty: any key is accepted).

    `columns` are names and values that a schedule may use, such as a time zone; in the site table they are a table.
    """

    name: str
    group: str = ""
    key: str = ""
    columns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"a site's name is {self.name!r}; give the name under which the site was registered")


@dataclass(frozen=True)
class ServerPolicy:
    """How long the server waits for sites, which answers it accepts, and what it asks for after a cycle."""

    deadline: float = option(600.0, "Seconds a round waits for the answers of its sites.", above=0)
    quorum: int = option(1, "Answers below which a round is skipped.", at_least=1)
    patience: int = option(3, "Skipped rounds in a row after which the run stops; it can be resumed.", at_least=1)
    max_attempts: int = option(3, "How often a message is sent when the message service loses it.", at_least=1)
    poll_interval: float = option(0.1, "Seconds between two checks for new answers.", above=0)
    norm_limit: float = option(30.0, "Largest norm of an update, as a multiple of the cohort's median norm.", above=1)
    group_deadlines: str = option("", "Other deadlines of groups, as in day=3600,night=43200.")
    on_group_offline: Literal["wait", "skip"] = option(
        "wait", "Whether a round whose sites are all offline waits for them, or is skipped at once."
    )
    enough: int | None = option(
        None, "Answers after which a round ends before its deadline; by default all.", at_least=1
    )
    late_answers: Literal["drop", "merge"] = option(
        "drop", "Whether an answer to an earlier round is dropped, or merged with a staleness weight."
    )
    max_staleness: int = option(4, "Rounds after which a late answer is dropped.", at_least=1, at_most=1000)
    staleness_exponent: float = option(
        0.5, "The weight of an answer s rounds late is (1 + s) to minus this.", at_least=0
    )
    history_limit: float = option(
        20.0, "Largest norm of an update, as a multiple of the median of what sites sent in the last cycles.", above=1
    )
    score_limit: float = option(
        100.0,
        "How far scores may lie beyond the range of the last cycles' scores, in multiples of that range, or of 0.1.",
        above=0,
    )
    quarantine_after: int = option(
        3, "Refused answers after which a site is no longer asked; 0 asks it always.", at_least=0
    )
    quarantine_cycles: int | None = option(
        None, "Cycles after which a site in quarantine is asked again; by default the run ends first.", at_least=1
    )
    registration_deadline: float = option(86400.0, "Seconds to wait for the first answer of every site.", above=0)
    evaluation: Literal["none", "histograms", "scores"] = option("histograms", "What sites send to compute the AUC.")
    evaluate_every: int = option(1, "Cycles between two evaluations.", at_least=1)
    validation_fraction: float = option(
        0.0,
        "Part of each class of a site's training rows that it holds out, so that rounds can be compared.",
        at_least=0,
        below=1,
    )
    on_site_failure: Literal["stop", "continue"] = option(
        "stop", "Whether a run begins without a site that fails before the first round."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enough is not None and self.enough < self.quorum:
            raise ValueError(f"enough is {self.enough}; it must be at least the quorum of {self.quorum}: raise enough")
        read_group_deadlines(self.group_deadlines)

    def deadline_of(self, group: str) -> float:
        """Seconds that a round waits for the sites of a group."""
        return read_group_deadlines(self.group_deadlines).get(group, self.deadline)


@dataclass(frozen=True, kw_only=True)
class FederationAgreement:
    """Everything that determines a federated run, except the sites' data."""

    recipe: Recipe
    sites: tuple[SiteEntry, ...]
    model: ModelConfig = Linear()
    policy: ServerPolicy = ServerPolicy()
    callbacks: tuple[Callback, ...] = ()
    schema: DataSchema | None = None

    def __post_init__(self) -> None:
        self.choose_callbacks()
        if self.policy.validation_fraction and self.policy.evaluation == "none":
            remedy = "set evaluation to 'histograms' or 'scores', or leave validation-fraction at 0"
            if find_client_dp(self.recipe) is not None:
                remedy = "leave it at 0, because a private run asks for no scores"
            fraction = f"validation-fraction is {self.policy.validation_fraction:g}"
            raise ValueError(f"{fraction}, but evaluation is 'none', so that no site sends scores: {remedy}")
        if self.policy.validation_fraction and self.recipe.is_private:
            fraction = f"validation-fraction is {self.policy.validation_fraction:g}"
            raise ValueError(
                f"{fraction}, but scores of rows that a private run protects are not noised: leave it at 0"
            )
        names = [site.name for site in self.sites]
        if not names:
            raise ValueError("sites is empty; list at least 1 site")
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"site {duplicates[0]!r} is listed {names.count(duplicates[0])} times; list it once")
        check_groups({site.name: site.group for site in self.sites})
        first = self.sites[0]
        for site in self.sites:
            if dict(site.columns).keys() != dict(first.columns).keys():
                have = (
                    f"has columns {sorted(dict(site.columns))}, site {first.name!r} has {sorted(dict(first.columns))}"
                )
                raise ValueError(f"site {site.name!r} {have}; give every site the same columns")
        check_deadline_groups(read_group_deadlines(self.policy.group_deadlines), {site.group for site in self.sites})

    def choose_callbacks(self) -> tuple[Callback, ...]:
        """The callbacks that `keep` and `patience` of the recipe ask for, then the given ones.

        Nothing is chosen by the sites' test rows.
        """
        how = "set validation-fraction, for example to 0.2, so that every site holds out training rows"
        return choose_callbacks(self.recipe, self.callbacks, self.policy.validation_fraction > 0, how)

    def to_json(self) -> str:
        """The agreement as indented JSON, with the version of its format."""
        return json.dumps({"format": AGREEMENT_FORMAT, **list_used_plugins(self), **to_plain(self)}, indent=2) + "\n"

    @staticmethod
    def read_json(path: Path) -> FederationAgreement:
        """Read an agreement that `to_json` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = data.pop("format", AGREEMENT_FORMAT)
        if version > AGREEMENT_FORMAT:
            raise ValueError(
                f"{path} has format {version}; this version reads up to {AGREEMENT_FORMAT}: upgrade fedauc"
            )
        with import_used_plugins(data, str(path)):
            agreement: FederationAgreement = from_plain(FederationAgreement, data, str(path))
        return agreement


def check_groups(groups: Mapping[str, str]) -> None:
    """Refuse sites (name to group) of which only some have a group."""
    ungrouped = [name for name, group in groups.items() if not group]
    if 0 < len(ungrouped) < len(groups):
        raise ValueError(f"site {ungrouped[0]!r} has no group, but others have one: give every site a group, or none")


def read_sites(path: Path) -> tuple[SiteEntry, ...]:
    """Read the server's site table: a TOML file with a section `[NAME]` per site, which holds `group` and `key`."""
    table = read_toml_file(path, "sites", "give the absolute path of the server's site table")
    keys = [field.name for field in fields(SiteEntry) if field.name != "name"]
    for name, entry in table.items():
        if not isinstance(entry, dict) or set(entry) - set(keys):
            raise ValueError(f"{path}: site {name!r} is {entry!r}; it must be a section with {' and '.join(keys)}")
    return tuple(_make_entry(name, dict(entry)) for name, entry in sorted(table.items()))


def _make_entry(name: str, entry: dict[str, Any]) -> SiteEntry:
    """A row of the table; the values of columns become text."""
    columns = entry.pop("columns", {})
    if not isinstance(columns, dict):
        raise ValueError(f"site {name!r} has columns {columns!r}; they must be a table, such as {{timezone = 3}}")
    return SiteEntry(name, **entry, columns=tuple((column, str(value)) for column, value in sorted(columns.items())))
