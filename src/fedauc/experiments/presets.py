"""Presets: named sets of recipe settings, one set per method. A configuration holds the settings, not the name.

A preset is data: fields of the recipe, the algorithm or the schedule, as `Recipe.of` takes them. It replaces a method's
defaults; settings that are given explicitly win over it.

>>> find_settings("as-printed", "cycp-fedavg")["stage_output"]
'last'
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedauc.discovery import lookup
from fedauc.objectives.minimax import Minimax
from fedauc.stages import Constant, Geometric


class Preset(NamedTuple):
    """What a preset is for in one line, and the settings of each method that it has."""

    about: str
    settings: Mapping[str, Mapping[str, Any]]


_PRINTED: Mapping[str, Any] = {"cycles": 100, "positives": 16, "negatives": 16, "weighting": "paper"}
"""What the paper has for every method. It prints no batch size; 16 examples of each class are ours."""

_BASELINE: Mapping[str, Any] = {**_PRINTED, "stages": Constant(), "stage_output": "last"}
"""The baselines are not stagewise: one learning rate, and the last iterate."""

# The paper tunes the first stage over 1, 10 and 50 cycles, decay over .1, .2 and .5, scale over 2, 5 and 10. These are
# the ones whose decay and scale are reciprocal, as its theorems ask.
_STAGEWISE: Mapping[str, Any] = {
    **_PRINTED,
    "stages": Geometric(initial=10, decay=0.5, scale=2.0),
    "stage_output": "round_mean",
}

_MINIMAX: Mapping[str, Any] = {**_STAGEWISE, "objective": Minimax(prior_from_data=True), "prox": 0.01}
"""Eq. (2) with the class prior, and the proximal term that Algorithm 1 leaves out, with the middle of its grid."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "as-printed": Preset(
            "The paper as printed: geometric stages that hand on the mean over rounds, the minimax objective with the "
            "class prior and a proximal term, weighting 'paper'; the last iterate at a constant learning rate for the "
            "baselines.",
            {
                "cycp-fedavg": _BASELINE,
                "a-fedavg": _BASELINE,
                "a-scaffold": _BASELINE,
                "rs-minimax": _MINIMAX,
                "rs-pairwise": _STAGEWISE,
                "cycp-minimax": _MINIMAX,
                "cycp-pairwise": _STAGEWISE,
            },
        )
    }
)
"""Every preset by name."""


def find_settings(preset: str, method: str) -> Mapping[str, Any]:
    """The settings of a preset for a method; a method that it says nothing about is refused."""
    settings = lookup("preset", preset, PRESETS).settings
    if method not in settings:
        raise ValueError(
            f"preset is {preset!r}, which has no settings for method {method!r}; it has: {', '.join(settings)}"
        )
    return settings[method]


def name_preset(method: str, recipe: Any) -> str | None:
    """The preset whose settings a recipe has, whatever its number of cycles; None if there is none."""
    for name, preset in PRESETS.items():
        expected = {key: value for key, value in preset.settings.get(method, {}).items() if key != "cycles"}
        owners = (recipe, recipe.algorithm, recipe.participation)
        actual = {key: next((getattr(owner, key) for owner in owners if hasattr(owner, key)), None) for key in expected}
        if expected and actual == expected:
            return name
    return None
