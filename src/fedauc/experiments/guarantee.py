"""What a private run promises, in plain words and numbers: `privacy.json` in its folder, and a sentence for its user.

Reports, `fedauc show` and the model card read `privacy.json`; what has been spent so far is in the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedauc.experiments.private_evaluation import PlannedReleases, count_evaluations
from fedauc.experiments.private_training import find_client_dp, has_client_noise
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Model
from fedauc.scoring.model_card import CardFacts
from fedauc.training import Training
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers import unwrap_algorithm
from fedauc.wrappers.example_dp import ExampleDP

SIMULATED = "In a simulation, roster.json, data.json and environment.json hold exact counts and a hash of all rows."


def describe_guarantee(
    recipe: Recipe, training: Training, releases: PlannedReleases, in_federation: bool = False
) -> dict[str, Any] | None:
    """The guarantee of a run as plain values for JSON; None for a run that is not private.

    `epsilon` is what the run will have spent at its end, and `epsilon_alone` what each part would cost by itself.
    Noise in a federation always comes from secrets.
    """
    account = training.account
    if account is None or not training.is_private:
        return None
    participations = account.count_participations(training.plan.total_rounds)
    evaluations = 0
    if account.evaluation_noise is not None:
        evaluations = count_evaluations(training.plan, releases.evaluate_every)
    return {
        "unit": account.unit,
        "epsilon": account.epsilon(participations, evaluations),
        "delta": account.delta,
        "budget": recipe.epsilon,
        "stop_at_epsilon": recipe.stop_at_epsilon,
        "noise_multiplier": account.noise_multiplier,
        "sampling": account.sampling,
        **_describe_noise(recipe, training),
        "noise_source": "secret" if in_federation else recipe.noise_source,
        "with_models": _list_parts(training),
        "participations": participations,
        "one_off": dict(account.one_off),
        "evaluations": evaluations,
        "evaluation_noise": account.evaluation_noise,
        "epsilon_alone": account.epsilon_by_part(participations, evaluations),
        "public": _list_public(recipe, releases),
        "not_protected": [*_list_trust(recipe, in_federation), *_list_unprotected(recipe, releases, in_federation)],
    }


def _list_parts(training: Training) -> list[str]:
    """What clients upload beside the change of the model, under the same noise budget."""
    algorithm = unwrap_algorithm(training.algorithm)
    shared = algorithm.init(training.setting, Model(torch.zeros(1), torch.zeros(0))).shared
    parts = []
    if algorithm.emits_histograms:
        parts.append("score histograms")
    if algorithm.diagnostics(shared):
        parts.append("dual variables")
    if hasattr(shared, "variate"):
        parts.append("control variates")
    return parts


def _describe_noise(recipe: Recipe, training: Training) -> dict[str, Any]:
    """What is clipped to which norm, and over how many rounds noise is correlated."""
    transform = find_client_dp(recipe)
    if transform is not None:
        bands = transform.bands or (1 if has_client_noise(recipe) else training.schedule.cycle_length)
        return {"clip": transform.clip, "clip_quantile": transform.clip_quantile, "bands": bands}
    wrapper = next(member for member in recipe.wrappers if isinstance(member, ExampleDP))
    return {"clip": wrapper.clip, "clip_quantile": None, "bands": 1}


def summarize_guarantee(guarantee: dict[str, Any]) -> str:
    """One sentence for a user, before training starts."""
    bands, is_client = guarantee["bands"], guarantee["unit"] == "client"
    correlation = "independent from round to round" if bands == 1 else f"correlated over {bands} rounds"
    sampling = guarantee["sampling"]
    # Clients may be drawn even so, but then the guarantee takes the draws as known.
    who = "every turn of a client counts"
    if sampling < 1:
        who = f"a client of a group takes part with probability {sampling:g}"
    clip = f"the norm {guarantee['clip']:g}"
    if guarantee["clip_quantile"] is not None:
        clip += f", which adapts to the {guarantee['clip_quantile']:g} quantile"
    covered = ["the models", *guarantee["with_models"], *guarantee["one_off"]]
    if guarantee["evaluations"]:
        covered.append(f"{guarantee['evaluations']} evaluations")
    multiple = f"{guarantee['noise_multiplier']:.4g} times the norm"
    work = f"uploads are clipped to {clip}, noise of {multiple}, {correlation}, is added to their sum"
    if not is_client:
        work = (
            f"the gradient of each row is clipped to {clip}, and the noise of a visit is "
            f"{guarantee['noise_multiplier']:.4g} times what a row can change"
        )
    return (
        f"the run is differentially private for every {guarantee['unit']}, with epsilon {guarantee['epsilon']:.4g} and "
        f"delta {guarantee['delta']:g} for all that it releases ({', '.join(covered)}): {work}, and {who}; public are "
        f"{', '.join(guarantee['public'])}"
    )


def describe_spending(guarantee: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """What a run has spent so far, in a line.

    >>> describe_spending({"unit": "client", "epsilon": 7.999, "delta": 1e-5, "budget": 8.0}, [{"epsilon": 3.2}])
    'epsilon 3.2 spent, 7.999 at the end, of a budget of 8, at delta 1e-05, for a client'
    """
    spent = records[-1].get("epsilon") if records else None
    parts = ["nothing spent yet" if spent is None else f"epsilon {spent:.4g} spent"]
    if spent is None or round(spent, 9) != round(guarantee["epsilon"], 9):
        parts.append(f"{guarantee['epsilon']:.4g} at the end")
    if guarantee["budget"] is not None:
        parts.append(f"of a budget of {guarantee['budget']:g}")
    return ", ".join([*parts, f"at delta {guarantee['delta']:g}", f"for {_with_article(guarantee['unit'])}"])


def _with_article(unit: str) -> str:
    return f"an {unit}" if unit[0] in "aeiou" else f"a {unit}"


def list_withheld(recipe: Recipe, is_private: bool, has_validation: bool) -> dict[str, str]:
    """What a private run leaves out of its result, and why, by name: `scores`, `calibration`.

    Exact scores of held-out rows are withheld where these are evaluated within the budget, and exact scores of
    training rows in every private run.
    """
    if not is_private:
        return {}
    withheld = {}
    if recipe.private_evaluation:
        withheld["scores"] = (
            "scores of test rows and the AUC of each site are exact, and this run is evaluated within its privacy "
            "budget"
        )
    if recipe.private_evaluation or not has_validation:
        rows = "validation" if has_validation else "training"
        withheld["calibration"] = (
            f"a calibration and a threshold would come from exact scores of {rows} rows, which are not public; the "
            "weights are in model.pt"
        )
    return withheld


def withhold_facts(facts: CardFacts, recipe: Recipe, guarantee: dict[str, Any] | None) -> CardFacts:
    """The facts of a model card without what a private run does not release, and with its guarantee."""
    if guarantee is None:
        return facts
    sentence = summarize_guarantee(guarantee)
    facts = replace(
        facts,
        data="The numbers of training rows are not released",
        parts=[part for part in facts.parts if part.part != "training"],
        privacy=[f"{sentence[0].upper()}{sentence[1:]}.", *guarantee["not_protected"]],
    )
    if not recipe.private_evaluation:
        return facts
    note = "Estimated from histograms of the test rows' scores with noise, within the privacy budget."
    return replace(facts, parts=[], client_auc=None, test=None, test_note=note)


def _list_public(recipe: Recipe, releases: PlannedReleases) -> list[str]:
    """What the guarantee takes as known to everybody."""
    transform = find_client_dp(recipe)
    public = ["the number of clients and who they are", "the schedule", "the names of the columns"]
    if transform is None:
        public.append("how many rows of each class a client has")
    if transform is None or transform.standardization == "public":
        public.append("the preparation of the inputs")
    if releases.held_out_parts and not recipe.private_evaluation:
        public.append("the held-out rows")
    return public


def _list_trust(recipe: Recipe, in_federation: bool) -> list[str]:
    """Who has to be trusted with what, in sentences."""
    if find_client_dp(recipe) is None:
        rows = "Single rows are protected, also from the server; what all rows of a client have in common is not."
        return [rows] if in_federation else [f"{rows} The hash of all rows in environment.json is confidential."]
    if has_client_noise(recipe):
        secure = next(member for member in recipe.transforms if isinstance(member, SecureSum))
        trust = (
            "The server sees sums of uploads, which hold the clients' own noise; it must follow the protocol. A client "
            f"knows its own noise: epsilon holds against {secure.colluding} of the clients of a sum, with the server. "
            "Visits and traffic say how many clients came."
        )
        return [trust] if in_federation else [f"{trust} {SIMULATED}"]
    files = "census.json and attendance.jsonl"
    if not in_federation:
        files = "roster.json, data.json, the hash of all rows in environment.json and the note on the data"
    return [
        f"The server is trusted: it sees every upload before noise is added. Checkpoints, {files} hold exact sums or "
        "counts, and visits and traffic say how many clients came; they are as confidential as the uploads."
    ]


def _list_unprotected(recipe: Recipe, releases: PlannedReleases, in_federation: bool) -> list[str]:
    """What a reader might take for protected, and is not; in sentences."""
    sentences = [
        "Epsilon is that of this run alone: another run on the same clients spends anew, and what several runs have "
        "spent adds up."
    ]
    if releases.held_out_parts and not recipe.private_evaluation:
        sentences.append("Held-out rows are not protected: their metrics and scores are exact.")
    if in_federation and (find_client_dp(recipe) is None or has_client_noise(recipe)):
        sentences.append("Every site draws its noise from a secret of its own, which it must not tell.")
    elif in_federation or recipe.noise_source == "secret":
        sentences.append("Whoever has the file noise.key can subtract the noise: it must stay with the server.")
    else:
        sentences.append(
            "The noise follows from the seed: whoever knows the seed can subtract it, and runs with the same seed have "
            "the same noise, so that their difference has none."
        )
    return sentences
