"""Private evaluation: the AUC from noised histograms of the clients' held-out rows, counted in the privacy budget.

After an evaluated round every client that has held-out rows contributes the histograms of their scores, one per class,
scaled down to a public norm C. The server adds Gaussian noise of standard deviation σ_e C to every bin of the sum, and
computes the AUC and its interval from that alone (`fedauc.metrics.histogram_auc`). The exact scores decide nothing
else. The noise of a round follows from the round, so that a resumed run releases the same histograms again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedauc.data.clients import Examples
from fedauc.experiments.callbacks.evaluation import is_evaluation_due
from fedauc.experiments.recipe import Recipe
from fedauc.metrics import DEFAULT_METRICS, Interval
from fedauc.metrics.histogram_auc import choose_bins, histogram_auc
from fedauc.metrics.metric import Metric
from fedauc.privacy.evaluation_histograms import private_histogram
from fedauc.random_tensors import KeyedNoise, NoiseSource, SecretNoise
from fedauc.stages import Plan
from fedauc.training import Training
from fedauc.transforms.client_dp import ClientDP

STREAMS = {"test": 0, "validation": 1}
"""The stream of a round's evaluation noise for each part of the held-out rows."""


class PlannedReleases(NamedTuple):
    """What the caller of `assemble_training` releases beside the uploads, so that it can be counted.

    The model is evaluated every `evaluate_every` cycles on `held_out_parts` parts of held-out rows (test, validation);
    `standardizes` says that columns are standardised by noised moments.
    """

    evaluate_every: int = 1
    held_out_parts: int = 0
    standardizes: bool = False


def count_evaluations(plan: Plan, every: int) -> int:
    """How often a run is evaluated if nothing stops it; one that is stopped early is not evaluated more often.

    Where a run stops, it is evaluated once more, but then the last planned evaluation is still to come.
    """
    last = plan.total_rounds - 1
    return sum(is_evaluation_due(plan.phase(round), every, round == last) for round in range(plan.total_rounds))


@dataclass(frozen=True)
class NoisedEvaluation:
    """Measures AUCs from histograms with noise; `multiplier` is the noise of one part over the norm `max_norm`."""

    multiplier: float
    max_norm: float
    bins: int
    seed: int
    secret: bytes | None = None

    @staticmethod
    def of_run(recipe: Recipe, training: Training, parts: int) -> NoisedEvaluation | None:
        """The private evaluation of a run on so many parts of held-out rows; None where held-out rows are public.

        An evaluation has the account's noise multiplier s for all its parts together, so that each has s·√parts. The
        number of bins follows from public numbers alone: the noise, N clients, and the noised class totals where the
        weighting needs these. A class cannot weigh more than N·C.
        """
        transform = next((member for member in recipe.transforms if isinstance(member, ClientDP)), None)
        if not recipe.private_evaluation or transform is None:
            return None
        assert training.account is not None
        assert training.account.evaluation_noise is not None
        multiplier, norm = training.account.evaluation_noise * math.sqrt(parts), transform.evaluation_norm
        clients, totals = training.setting.client_count, training.setting.totals
        known = None if totals is None else totals.rows or totals.holders
        positives, negatives = (min(total, clients * norm) for total in known or (clients, clients))
        bins = choose_bins(multiplier * norm, positives, negatives)
        return NoisedEvaluation(multiplier, norm, bins, recipe.seed, training.uploads.secret)

    def measure_auc(self, scores: np.ndarray, examples: Examples, part: str, round: int) -> Interval | None:
        """The AUC of one part of the held-out rows after a round; None where the noise hides it."""
        assert examples.clients is not None
        names, client_of_row = np.unique(np.asarray(examples.clients), return_inverse=True)
        # A score that is no number must not stop the run, because who has such a row is nobody's business.
        counts, noise = private_histogram(
            np.nan_to_num(scores, nan=0.0),
            examples.labels.cpu().numpy(),
            client_of_row,
            len(names),
            self.bins,
            self.max_norm,
            self.multiplier,
            lambda count: self._make_noise(round).draw_normal(STREAMS[part], count).numpy(),
        )
        return histogram_auc(counts, noise)

    def _make_noise(self, round: int) -> NoiseSource:
        key = (self.seed, "evaluation", round)
        return KeyedNoise(*key) if self.secret is None else SecretNoise(self.secret, *key)


def check_private_evaluation(
    recipe: Recipe, metrics: tuple[Metric, ...], validation: Examples | None, test: Examples | None
) -> None:
    """Refuse what noised histograms cannot evaluate."""
    if not recipe.private_evaluation:
        return
    if recipe.algorithm.objective.takes_embeddings:
        raise ValueError(
            f"private_evaluation is true, but objective {recipe.algorithm.objective.name!r} gives embeddings, which "
            "have no histogram of scores: leave private_evaluation out"
        )
    names = tuple(metric.text for metric in metrics)
    others = [name for name in names if name != "auc"]
    if others and names != DEFAULT_METRICS:
        raise ValueError(
            f"metrics lists {others[0]!r}, but private_evaluation is true, and noised histograms give the AUC alone: "
            "use metric 'auc'"
        )
    parts = {"validation": validation, "test": test}
    if validation is None and test is None:
        raise ValueError("private_evaluation is true, but there are no held-out rows to evaluate on: give test rows")
    for part, examples in parts.items():
        if examples is not None and examples.clients is None:
            raise ValueError(
                f"private_evaluation is true, but the {part} rows do not say whose they are, so that no client's share "
                "in a histogram can be bounded: use data with a client column, or leave private_evaluation out"
            )
