"""What a tuning searches: options of a run, each with a range or a list of values.

>>> from fedauc.experiments.recipe import Recipe
>>> space = SearchSpace.of(Config(recipe=Recipe.of("cycp-minimax")), ["learning-rate=0.01:1:log"])
>>> [dimension.to_text() for dimension in space.dimensions]
['learning-rate=0.01:1.0:log']
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from fedauc.experiments.options import InapplicableOption, build_config, list_options
from fedauc.experiments.recipe import list_decided
from fedauc.experiments.sweep import read_list
from fedauc.fields import unwrap_optional

if TYPE_CHECKING:
    import optuna

DEFAULT_SEARCH = (
    "learning-rate=0.003:1:log",
    "local-steps=4:64:log",
    "weighting=clients,pooled",
    "objective.scale=0.25:4:log",
    "model.width=32,64,128",
    "model.hidden=32,64,128",
)
"""What is searched unless the user says otherwise, as far as the method and the model have these options."""


@dataclass(frozen=True)
class Dimension:
    """An option that is searched: one of several texts, or a number in a range, on a logarithmic scale if `log`."""

    option: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @staticmethod
    def parse(text: str, short: Mapping[str, str] = {}) -> Dimension:
        """From `option=low:high`, `option=low:high:log` or `option=a,b,c`; `short` maps short names to full ones.

        >>> Dimension.parse("lr=0.01:1:log", {"lr": "learning-rate"})
        Dimension(option='learning-rate', choices=(), low=0.01, high=1.0, log=True)
        """
        name, equals, values = text.partition("=")
        option = short.get(name, name)
        form = "it must be option=low:high, option=low:high:log or option=a,b,..."
        if not equals or not option:
            raise ValueError(f"search is {text!r}; {form}, such as learning-rate=0.001:1:log")
        if option in ("seed", "metrics"):
            raise ValueError(f"search is {text!r}, but trials with different {option} are not comparable: leave it out")
        if ":" not in values:
            return Dimension(option, tuple(read_list(f"search {option}", values)))
        low, high, *scale = values.split(":")
        try:
            bounds = float(low), float(high)
        except ValueError as error:
            raise ValueError(f"search is {text!r}; {form}, where low and high are numbers") from error
        log = scale == ["log"]
        if (scale and not log) or not bounds[0] < bounds[1] or not math.isfinite(bounds[1] - bounds[0]):
            raise ValueError(f"search is {text!r}; {form}, where low is below high")
        if log and bounds[0] <= 0:
            raise ValueError(f"search is {text!r}; on a logarithmic scale low must be above 0: raise it")
        return Dimension(option, (), *bounds, log)

    @property
    def example(self) -> str:
        """A value as text, to see whether the option applies."""
        return self.choices[0] if self.choices else self.format_number(self.low)

    def suggest(self, trial: optuna.Trial) -> str:
        """The value of a trial, as text; four digits are enough for a number, and easier to read."""
        if self.choices:
            return str(trial.suggest_categorical(self.option, self.choices))
        if self._is_whole:
            return str(trial.suggest_int(self.option, round(self.low), round(self.high), log=self.log))
        value = trial.suggest_float(self.option, self.low, self.high, log=self.log)
        return self.format_number(min(max(float(f"{value:.4g}"), self.low), self.high))

    @property
    def _is_whole(self) -> bool:
        types = {known.name: known.type for known in list_options()}
        kind = unwrap_optional(lookup("option", self.option, types, source="`fedauc run --help`"))
        return int in (kind, *typing.get_args(kind)[:1])

    def format_number(self, value: float) -> str:
        """A number as the option takes it."""
        return str(round(value)) if self._is_whole else repr(value)

    def to_text(self) -> str:
        """As `parse` reads it."""
        bounds = f"{self.low!r}:{self.high!r}{':log' * self.log}"
        return f"{self.option}={','.join(self.choices) if self.choices else bounds}"


class SearchSpace(NamedTuple):
    """The configuration that trials start from, and the options that differ between them."""

    base: Config
    dimensions: tuple[Dimension, ...]

    @staticmethod
    def of(
        base: Config, search: Sequence[str] = (), fixed: Mapping[str, str] = {}, short: Mapping[str, str] = {}
    ) -> SearchSpace:
        """The space that texts describe, or the default one without options that are fixed or do not apply.

        `fixed` are options with their values; a `preset` among them fixes what it sets.
        """
        dimensions = [Dimension.parse(text, short) for text in search or DEFAULT_SEARCH]
        if not search:
            preset = None if (named := fixed.get("preset", "none")) == "none" else named
            decided = {name.replace("_", "-") for name in list_decided(base.recipe.method, preset)}
            dimensions = [part for part in dimensions if not {part.option, part.option.split(".")[0]} & decided]
            dimensions = [part for part in dimensions if part.option not in fixed]
        for number, dimension in enumerate(dimensions):
            if dimension.option in fixed:
                raise ValueError(f"{dimension.option} is {fixed[dimension.option]} and searched too; give it once")
            if dimension.option in [earlier.option for earlier in dimensions[:number]]:
                raise ValueError(f"search lists {dimension.option} twice; give all its values at once")
        # Options that choose a member come before the parameters of that member.
        ordered = sorted(dimensions, key=lambda dimension: dimension.option.count("."))
        space = SearchSpace(base, tuple(ordered))
        refused = {dimension.option: space._refuse(dimension) for dimension in ordered}
        if not search:
            return space._replace(dimensions=tuple(part for part in ordered if refused[part.option] is None))
        for error in refused.values():
            if error is not None:
                raise error
        return space

    def propose(self, trial: optuna.Trial) -> dict[str, str]:
        """The options of a trial as texts; parameters of members that it does not use are left out."""
        texts: dict[str, str] = {}
        for dimension in self.dimensions:
            try:
                build_config(None, self.base, {**texts, dimension.option: dimension.example})
            except InapplicableOption:
                continue
            texts[dimension.option] = dimension.suggest(trial)
        return texts

    def _refuse(self, dimension: Dimension) -> InapplicableOption | None:
        """Why an option applies to no searched member; a value that the option cannot have is an error at once."""
        members = [
            {part.option: choice} for part in self.dimensions if "." not in part.option for choice in part.choices
        ]
        values = dimension.choices or (dimension.example, dimension.format_number(dimension.high))
        error = None
        for chosen in ({}, *members):
            try:
                for text in values:
                    build_config(None, self.base, {**chosen, dimension.option: text})
            except InapplicableOption as refusal:
                error = error or refusal
            else:
                return None
        return error
