"""The runs of a sweep: every method with every combination of the varied options, and every seed.

>>> varied = read_varied(["learning-rate=0.01,0.1"], {})
>>> list(expand_sweep(["cycp-fedavg"], [0], varied, {"cycles": "5"}))
['cycp-fedavg/learning-rate=0.01/seed-0', 'cycp-fedavg/learning-rate=0.1/seed-0']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedauc.experiments.config import Config
from fedauc.experiments.options import InapplicableOption, build_config


def expand_sweep(
    methods: Sequence[str],
    seeds: Sequence[int],
    varied: Mapping[str, Sequence[str]],
    texts: Mapping[str, str],
    base: Config | None = None,
) -> dict[str, Config]:
    """Every run's configuration, by the name of its folder: `method/option=value/seed-0`.

    An option is set in the combinations that have it, and at least one must: the scale of the sigmoid surrogate is not
    varied under another objective.
    """
    for option in set(varied) & set(texts):
        raise ValueError(f"{option} is {texts[option]} and varied too; give it once")
    runs: dict[str, Config] = {}
    used: set[str] = set()
    refused: dict[str, InapplicableOption] = {}
    for method, values in itertools.product(methods, itertools.product(*varied.values())):
        combination = dict(zip(varied, values, strict=True))
        config, inapplicable = _build_applicable(method, base, {**texts, **combination})
        refused |= inapplicable
        used |= {option for option in (*combination, *texts) if option not in inapplicable}
        settings = [f"{option}={value}" for option, value in combination.items() if option not in inapplicable]
        for seed in seeds:
            # Characters that a path cannot hold become dashes.
            parts = [method, *(re.sub(r"[^\w.+=-]+", "-", setting) for setting in settings), f"seed-{seed}"]
            name, seeded = "/".join(parts), replace(config, recipe=replace(config.recipe, seed=seed))
            if runs.setdefault(name, seeded) != seeded:
                raise ValueError(
                    f"two runs would share the folder {name}; give values that differ in letters or digits"
                )
    for option in [*texts, *varied]:
        if option not in used:
            raise refused[option]
    names: dict[Config, str] = {}
    for name, config in runs.items():
        if names.setdefault(config, name) != name:
            raise ValueError(f"{names[config]} and {name} are the same run; list each value once")
    return runs


def read_varied(texts: Sequence[str], short: Mapping[str, str]) -> dict[str, list[str]]:
    """Varied options from texts such as `learning-rate=0.01,0.1`; `short` maps short names to options' full names."""
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        option = short.get(name, name)
        if not equals or not option:
            raise ValueError(f"vary is {text!r}; it must be option=value,value, such as learning-rate=0.01,0.1")
        if option in ("seed", "method"):
            raise ValueError(f"vary is {text!r}, but a sweep takes --{option}s; use --{option}s {values}")
        if option == "metrics":
            raise ValueError(
                f"vary is {text!r}, but all runs of a sweep are compared by the same metrics; use --metrics"
            )
        if option in varied:
            raise ValueError(f"vary lists {option} twice; give all its values at once")
        varied[option] = read_list(f"vary {option}", values)
    return varied


def read_list(name: str, text: str) -> list[str]:
    """The items of a list such as `a,b`."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items or len(set(items)) < len(items):
        raise ValueError(f"{name} is {text!r}; it must list at least 1, each once")
    return items


def read_seeds(text: str) -> list[int]:
    """The seeds of a list such as `0,1,2`."""
    try:
        seeds = [int(seed) for seed in read_list("seeds", text)]
    except ValueError as error:
        raise ValueError(f"seeds is {text!r}; it must list whole numbers, each once, such as 0,1,2") from error
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds is {text!r}; it must list each seed once")
    return seeds


def setting_of(name: str) -> str:
    """The setting of a run: its name without the seed.

    >>> setting_of("cycp-fedavg/learning-rate=0.1/seed-3")
    'cycp-fedavg/learning-rate=0.1'
    """
    return name.rpartition("/")[0]


def _build_applicable(
    method: str, base: Config | None, texts: Mapping[str, str]
) -> tuple[Config, dict[str, InapplicableOption]]:
    """The configuration of the options that apply to it, and the errors of the others."""
    applicable, inapplicable = dict(texts), dict[str, InapplicableOption]()
    while True:
        try:
            return build_config(method, base, applicable), inapplicable
        except InapplicableOption as error:
            inapplicable[error.option] = error
            del applicable[error.option]
