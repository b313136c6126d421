"""The runs of a sweep: every method with every combination of the varied options, and every seed.

>>> varied = read_varied(["learning-rate=0.01,0.1"], {})
>>> list(expand(["cycp-fedavg"], [0], varied, {"cycles": "5"}))
['cycp-fedavg/learning-rate-0.01/seed-0', 'cycp-fedavg/learning-rate-0.1/seed-0']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedauc.experiments.config import Config
from fedauc.experiments.options import InapplicableOption, build_config


class BuiltConfig(NamedTuple):
    """A configuration, and the options it has no place for."""

    config: Config
    refused: dict[str, InapplicableOption]


def expand_sweep(
    methods: Sequence[str],
    seeds: Sequence[int],
    varied: Mapping[str, Sequence[str]],
    texts: Mapping[str, str],
    base: Config | None = None,
) -> dict[str, Config]:
    """Every run's configuration, by its place: `method/option-value/seed-0`.

    An option goes to the combinations that have it, and at least one must: the scale of the sigmoid surrogate is not
    varied under another objective.
    """
    for option in set(varied) & set(texts):
        raise ValueError(f"{option} is {texts[option]} and varied too; give it once")
    runs: dict[str, Config] = {}
    used: set[str] = set()
    refused: dict[str, InapplicableOption] = {}
    for method, values in itertools.product(methods, itertools.product(*varied.values())):
        chosen = dict(zip(varied, values, strict=True))
        built = _build_config(method, base, {**texts, **chosen})
        refused |= built.refused
        mine = {option: value for option, value in chosen.items() if option not in built.refused}
        used |= set(mine) | set(texts) - set(built.refused)
        for seed in seeds:
            seeded = replace(built.config, recipe=replace(built.config.recipe, seed=seed))
            _add_run(runs, "/".join([method, *map(_folder_name, mine.items()), f"seed-{seed}"]), seeded)
    for option in [*texts, *varied]:
        if option not in used:
            raise refused[option]
    _refuse_duplicates(runs)
    return runs


def read_varied(texts: Sequence[str], short: Mapping[str, str]) -> dict[str, list[str]]:
    """Varied options from texts such as `learning-rate=0.01,0.1`; `short` maps other names of an option to its own."""
    found: dict[str, list[str]] = {}
    for text in texts:
        given, equals, values = text.partition("=")
        option = short.get(given, given)
        if not equals or not option:
            raise ValueError(f"vary is {text!r}; it must be option=value,value, such as learning-rate=0.01,0.1")
        if option in ("seed", "method"):
            raise ValueError(f"vary is {text!r}, but a sweep takes --{option}s; use --{option}s {values}")
        if option in found:
            raise ValueError(f"vary lists {option} twice; give all its values at once")
        found[option] = read_list(f"vary {option}", values)
    return found


def read_list(what: str, text: str) -> list[str]:
    """The items of a list such as `a,b`."""
    found = [item.strip() for item in text.split(",") if item.strip()]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{what} is {text!r}; it must list at least 1, each once")
    return found


def read_seeds(text: str) -> list[int]:
    """The seeds of a list such as `0,1,2`."""
    try:
        found = [int(seed) for seed in read_list("seeds", text)]
    except ValueError as error:
        raise ValueError(f"seeds is {text!r}; it must list whole numbers, each once, such as 0,1,2") from error
    if len(set(found)) < len(found):
        raise ValueError(f"seeds is {text!r}; it must list each seed once")
    return found


def setting_of(place: str) -> str:
    """What the runs of a place's seeds have in common.

    >>> setting_of("cycp-fedavg/learning-rate-0.1/seed-3")
    'cycp-fedavg/learning-rate-0.1'
    """
    return place.rpartition("/")[0]


def _build_config(method: str, base: Config | None, texts: Mapping[str, str]) -> BuiltConfig:
    """The configuration of the options that have a place."""
    mine, refused = dict(texts), dict[str, InapplicableOption]()
    while True:
        try:
            return BuiltConfig(build_config(method, base, mine), refused)
        except InapplicableOption as foreign:
            refused[foreign.option] = foreign
            del mine[foreign.option]


def _folder_name(chosen: tuple[str, str]) -> str:
    """A folder's name; what a path cannot hold becomes a dash."""
    return re.sub(r"[^\w.+-]+", "-", "-".join(chosen))


def _add_run(runs: dict[str, Config], place: str, config: Config) -> None:
    if runs.setdefault(place, config) != config:
        raise ValueError(f"two runs would share the folder {place}; give values that differ in letters or digits")


def _refuse_duplicates(runs: Mapping[str, Config]) -> None:
    places: dict[str, str] = {}
    for place, config in runs.items():
        other = places.setdefault(config.to_json(), place)
        if other != place:
            raise ValueError(f"{other} and {place} are the same run; list each value once")
