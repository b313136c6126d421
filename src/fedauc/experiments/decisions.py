"""What the library has decided for a run, in one sentence each: where the sites are, their groups, the engine."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

from fedauc.data.weighting import class_scales
from fedauc.engines import explain_engine
from fedauc.experiments.assembly import Assembly
from fedauc.experiments.guarantee import summarize_guarantee
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Roster, Setting
from fedauc.objectives.minimax import Minimax
from fedauc.participation.cyclic import Cyclic
from fedauc.wrappers import unwrap_algorithm

UNEVEN_SCALE = 20.0
"""Sites are called uneven where one has this many times the rows of the mean site."""


def describe_decisions(
    recipe: Recipe, roster: Roster, assembly: Assembly, guarantee: dict[str, Any] | None = None
) -> list[str]:
    """The sentences that a user reads before training starts; `guarantee` is that of a private run."""
    training = assembly.training
    total, scoring = training.plan.total_rounds, training.plan.scoring_rounds
    groups = len(training.schedule.groups)
    if isinstance(recipe.participation, Cyclic):
        who = f"{groups} {'group' if groups == 1 else 'groups'} {recipe.participation.explain_groups(roster)}"
    else:
        name = getattr(recipe.participation, "name", type(recipe.participation).__name__)
        who = f"rounds by the participation {name!r}"
    sites = int((roster.sizes > 0).sum())
    sentences = [f"{sites} sites are simulated in this process, with all rows in one place, in {who}"]
    if scoring:
        sentences.append(
            f"{scoring} of the {total} rounds of {recipe.method} only collect scores, which later rounds compare with"
        )
    objective = unwrap_algorithm(training.algorithm).objective
    if isinstance(objective, Minimax) and objective.prior_from_data:
        sentences.append(f"the class prior is {objective.prior:.4g}, the share of positives in the training data")
    sentences += _describe_uneven_sites(recipe, training.setting)
    if guarantee is not None:
        sentences.append(summarize_guarantee(guarantee))
    if recipe.epsilon == math.inf:
        sentences.append("epsilon is infinite, so that nothing is clipped and no noise is added: nobody is protected")
    engine = explain_engine(recipe.engine, training.engine, training.plan.local_steps)
    return [*sentences, engine] if engine else sentences


def _describe_uneven_sites(recipe: Recipe, setting: Setting) -> list[str]:
    """How much longer the steps of the largest site are than those of the mean site, where that can matter.

    A private run says nothing: the rows of its largest site are no public number.
    """
    if recipe.weighting != "pooled" or recipe.is_private:
        return []
    longest = float(class_scales(setting.census, recipe.weighting).max())
    if longest < UNEVEN_SCALE:
        return []
    return [
        f"one site has {longest:.0f} times the rows of a class that the mean site has, and under the weighting "
        "'pooled' its steps are as much longer: if it diverges, lower the learning rate or use weighting 'clients'"
    ]


def describe_private_runs(recipes: Sequence[Recipe]) -> list[str]:
    """What several runs on the same clients reveal together, for the user of a comparison; nothing for one run."""
    private = [recipe for recipe in recipes if recipe.is_private]
    if len(private) < 2:
        return []
    sentence = (
        f"{len(private)} private runs on the same clients spend their budgets one after another: epsilon is that of "
        "each run alone, and what they reveal together adds up"
    )
    seeds = [recipe.seed for recipe in private if recipe.noise_source == "seed"]
    if len(set(seeds)) < len(seeds):
        sentence += (
            ". Runs with the same seed share their noise, so that their difference has none: publish one of them, or "
            "use --noise-source secret"
        )
    return [sentence]


@functools.lru_cache(maxsize=256)
def log_once(sentence: str) -> None:
    """Log a sentence, unless this process has logged it before: the runs of a comparison decide much alike."""
    logging.getLogger("fedauc").info("%s", sentence)
