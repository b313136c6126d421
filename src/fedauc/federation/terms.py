"""The terms of a federation: who belongs to it, how long to wait for whom, and what may be asked."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fedauc.experiments.codec import decode, encode
from fedauc.experiments.recipe import Recipe
from fedauc.models.linear import Linear
from fedauc.models.model import ModelConfig

FORMAT = 1
"""Raised when an old reader could misunderstand a new file."""


@dataclass(frozen=True)
class SiteEntry:
    """A line of the server's table: a site's registered name, its group, and its public key (empty: any)."""

    name: str
    group: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"a site's name is {self.name!r}; give the name it was registered with")


@dataclass(frozen=True)
class Terms:
    """How the server deals with sites.

    `deadline`: seconds a round waits for its group; `quorum`: answers without which a round is skipped; `patience`:
    skipped rounds in a row after which the run stops (it can be resumed); `tries`: how often an order is sent when the
    service loses it; `norm_limit`: how many times the cohort's median norm a change may have; `gather`: seconds to wait
    for every site's first answer; `evaluation`: what sites are asked for after a cycle.
    """

    deadline: float = 600.0
    quorum: int = 1
    patience: int = 3
    tries: int = 3
    poll: float = 0.1
    norm_limit: float = 30.0
    gather: float = 86400.0
    evaluation: Literal["none", "histograms", "scores"] = "histograms"
    evaluate_every: int = 1

    def __post_init__(self) -> None:
        for name in ("deadline", "poll", "gather"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a number of seconds above 0")
        for name in ("quorum", "patience", "tries", "evaluate_every"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not self.norm_limit > 1:
            raise ValueError(f"norm_limit is {self.norm_limit}; it must be above 1: a median client has norm 1")
        if self.evaluation not in ("none", "histograms", "scores"):
            raise ValueError(f"evaluation is {self.evaluation!r}; use 'none', 'histograms' or 'scores'")


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Everything that decides a federated run besides the sites' data."""

    recipe: Recipe
    sites: tuple[SiteEntry, ...]
    model: ModelConfig = Linear()
    terms: Terms = Terms()

    def __post_init__(self) -> None:
        names = [site.name for site in self.sites]
        if not names:
            raise ValueError("sites is empty; list at least 1 site")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"site {twice[0]!r} is listed {names.count(twice[0])} times; list each once")
        if len({site.group == "" for site in self.sites}) > 1:
            bare = next(site.name for site in self.sites if not site.group)
            raise ValueError(f"site {bare!r} has no group, but others have: give every site one, or none")

    def to_json(self) -> str:
        """Indented JSON, with the format it is written in."""
        return json.dumps({"format": FORMAT, **encode(self)}, indent=2) + "\n"

    @staticmethod
    def read(path: Path) -> Federation:
        """Read what `to_json` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = data.pop("format", FORMAT)
        if found > FORMAT:
            raise ValueError(f"{path} has format {found}; this version reads up to {FORMAT}: upgrade fedauc")
        federation: Federation = decode(Federation, data, str(path))
        return federation


def read_sites(path: Path) -> tuple[SiteEntry, ...]:
    """The server's table: a TOML file with one `[NAME]` section per site, holding `group` and `key`."""
    if not path.is_file():
        raise ValueError(f"sites is {str(path)!r}; no such file: give the absolute path of the server's table")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML ({error}); fix it") from error
    known = {field.name for field in fields(SiteEntry)} - {"name"}
    for name, entry in table.items():
        if not isinstance(entry, dict) or set(entry) - known:
            raise ValueError(f"{path}: site {name!r} is {entry!r}; it must be a section with {', '.join(known)}")
    return tuple(SiteEntry(name, **entry) for name, entry in sorted(table.items()))
