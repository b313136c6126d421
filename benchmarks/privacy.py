"""AUC against the privacy budget: independent and banded noise, four methods, three datasets.

    python benchmarks/privacy.py --studies fraud,insurance --processes 2
    python benchmarks/privacy.py --studies images --device cuda --data-folder FOLDER

Every method gets the same settings in every cell (a study, a kind of noise and a budget): all pairs of its learning
rates and clipping norms, each trained once with seed 0. The pair with the highest validation AUC is trained again with
the seeds 1, 2 and 3, whose test AUC is reported. Runs without privacy choose among as many settings: learning rates
alone, or the same pairs with clipping but no noise, since clipping alone can help. Held-out rows count as public.
Records are appended as runs finish, and runs that are recorded are not repeated. `benchmarks/privacy_summary.py` makes
the tables and the figure of docs/privacy.md of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedauc.data.clients import Clients, Examples
from fedauc.data.dataset import Dataset
from fedauc.data.datasets.cifar import Cifar10
from fedauc.data.datasets.creditcard import CreditCardFull
from fedauc.data.datasets.synthetic import SyntheticMedicare
from fedauc.data.partitions import IID, Natural, Partition
from fedauc.data.preparation import Preparation, prepare_table
from fedauc.experiments.fitting import fit
from fedauc.interfaces import Participation
from fedauc.models.cnn import SmallCNN
from fedauc.models.linear import Linear
from fedauc.models.model import ModelConfig
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.transforms.client_dp import ClientDP
from harness.report import describe_hardware

RECORDS = Path(__file__).parent / "records" / "privacy.jsonl"
SEEDS = (1, 2, 3)
METHODS: dict[str, dict[str, Any]] = {
    "cycp-pairwise": {"pool": "histogram"},
    "cycp-minimax": {},
    "cycp-fedavg": {},
    "cycp-fedavg-balanced": {},
}
WIDE_RATE_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)
"""Multiples of the method's own learning rate for runs without privacy, of which as many are tried as pairs with it."""


@dataclass(frozen=True)
class Study:
    """A dataset in the hands of clients, how they take part, and the budgets to try."""

    data: Dataset
    participation: Participation
    delta: float
    budgets: tuple[float, ...]
    cycles: int
    partition: Partition = field(default_factory=Natural)
    rate_factors: tuple[float, ...] = (0.1, 0.3, 1.0)
    clips: tuple[float, ...] = (0.03, 0.1, 0.3)
    model: ModelConfig = field(default_factory=Linear)
    preparation: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def make_studies(folder: str) -> dict[str, Study]:
    """Every study by name; the folder holds the files of card fraud and CIFAR-10."""
    ten_thousand = CyclicPoisson(rate=0.1, groups=10, assignment="random")
    return {
        "fraud": Study(
            CreditCardFull(folder=folder, validation_fraction=0.3),
            Cyclic(),
            1e-3,
            (2.0, 8.0, 32.0, 128.0),
            30,
            settings={"weighting": "clients"},
        ),
        "insurance": Study(
            SyntheticMedicare(),
            ten_thousand,
            1e-5,
            (0.5, 1.0, 2.0, 4.0, 8.0),
            100,
            partition=IID(clients=10_000),
            settings={"weighting": "pooled"},
        ),
        "images": Study(
            Cifar10(folder=folder),
            ten_thousand,
            1e-5,
            (2.0, 8.0, 32.0),
            30,
            partition=IID(clients=10_000),
            rate_factors=(0.3, 1.0),
            clips=(0.1, 0.3),
            model=SmallCNN(),
            settings={"weighting": "pooled", "local_steps": 4, "positives": 2, "negatives": 2},
        ),
    }


@dataclass(frozen=True)
class Job:
    """One training: its cell and its settings."""

    study: str
    method: str
    noise: str
    epsilon: float
    learning_rate: float
    clip: float
    seed: int

    @property
    def cell(self) -> tuple[str, str, str, float]:
        """What a setting is chosen for."""
        return self.study, self.method, self.noise, self.epsilon


def list_tuning_jobs(name: str, study: Study) -> Iterator[Job]:
    """All settings of all cells of a study, with seed 0."""
    for method in METHODS:
        rate = 0.01 if method == "cycp-minimax" else 0.1
        count = len(study.rate_factors) * len(study.clips)
        for factor in WIDE_RATE_FACTORS[-count:]:
            yield Job(name, method, "none", math.inf, factor * rate, math.inf, 0)
            if method == "cycp-pairwise":
                yield Job(name, method, "none, raw scores", math.inf, factor * rate, math.inf, 0)
        cells = [("none, clipped", math.inf), *itertools.product(("independent", "banded"), study.budgets)]
        for (noise, epsilon), factor, clip in itertools.product(cells, study.rate_factors, study.clips):
            yield Job(name, method, noise, epsilon, factor * rate, clip, 0)


class Prepared:
    """The data of a study, loaded once and shared with the processes that train."""

    def __init__(self, study: Study, device: str) -> None:
        split = prepare_table(study.data.load(0), Preparation(partition=study.partition, **study.preparation), 0)
        assert split.validation is not None
        self.clients: Clients = split.train.to(torch.float32, device)
        self.validation, self.test = (_thin_negatives(part) for part in (split.validation, split.test))


def _thin_negatives(rows: Examples, most: int = 50_000) -> Examples:
    """All positives and the first negatives: the AUC of a million rows takes longer than a round of training."""
    positives, negatives = (torch.nonzero(rows.labels == label)[:, 0] for label in (1, 0))
    chosen = torch.cat([positives, negatives[:most]])
    return Examples(rows.inputs[chosen], rows.labels[chosen])


def train_job(job: Job, study: Study, prepared: Prepared, device: str) -> dict[str, Any]:
    """Train a job, and record its validation and test AUC, what it spent and what it sent."""
    settings: dict[str, Any] = {**METHODS[job.method], **study.settings}
    if job.noise == "none, raw scores":
        settings["pool"] = "cycle"
    if job.noise == "none, clipped":
        settings["transforms"] = (ClientDP(clip=job.clip, noise_multiplier=0.0),)
    if math.isfinite(job.epsilon):
        bands = 1 if job.noise == "independent" else None
        transform = ClientDP(clip=job.clip, bands=bands)
        settings |= {"epsilon": job.epsilon, "delta": study.delta, "transforms": (transform,)}
    begin = time.perf_counter()
    try:
        fitted = fit(
            study.model,
            prepared.clients,
            job.method,
            test=prepared.test,
            validation=prepared.validation,
            metrics="auc",
            participation=study.participation,
            cycles=study.cycles,
            learning_rate=job.learning_rate,
            seed=job.seed,
            device=device,
            verbose=False,
            **settings,
        )
    except Exception as error:  # a diverging setting is a result too
        if type(error).__name__ != "TrainingStopped":
            raise
        return {**vars(job), "validation": 0.0, "test": None, "stopped": str(error)}
    final = fitted.history[-1][1]
    return {
        **vars(job),
        "validation": round(float(final["validation_auc"]), 5),
        "test": round(float(final["auc"]), 5),
        "bytes_up": fitted.traffic.bytes_up,
        "bytes_down": fitted.traffic.bytes_down,
        "visits": fitted.traffic.visits,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def choose_settings(records: list[dict[str, Any]], jobs: list[Job]) -> Iterator[Job]:
    """For every cell, the setting with the highest validation AUC, with each of the seeds that are reported."""
    by_key = {_job_key(record): record for record in records}
    for _, cell_jobs in itertools.groupby(sorted(jobs, key=lambda job: job.cell), key=lambda job: job.cell):
        best = max(cell_jobs, key=lambda job: float(by_key[_job_key(vars(job))]["validation"]))
        for seed in SEEDS:
            yield Job(**{**vars(best), "seed": seed})


def _job_key(values: Mapping[str, Any]) -> str:
    return json.dumps([values[name] for name in Job.__dataclass_fields__])


_SHARED: dict[str, Any] = {}


def _train_shared(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train_job(job, _SHARED["study"], _SHARED["prepared"], _SHARED["device"])


def run_jobs(jobs: list[Job], path: Path, processes: int) -> None:
    """Train the jobs that are not recorded yet, and append their records as they come."""
    done = {_job_key(record) for record in read_records(path)}
    missing = [job for job in jobs if _job_key(vars(job)) not in done]
    print(f"{len(missing)} of {len(jobs)} runs are left", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        if processes == 1:
            finished: Any = map(_train_shared, missing)
            _append_records(finished, stream, len(missing))
        else:
            # Forked processes share the data; each trains with one thread.
            with multiprocessing.get_context("fork").Pool(processes) as pool:
                _append_records(pool.imap_unordered(_train_shared, missing), stream, len(missing))


def _append_records(finished: Iterator[dict[str, Any]], stream: Any, total: int) -> None:
    begin = time.perf_counter()
    for number, record in enumerate(finished, 1):
        stream.write(json.dumps(record) + "\n")
        stream.flush()
        if number % 20 == 0 or number == total:
            print(f"  {number} of {total} runs, {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    """Tune every cell, then train the chosen settings again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default="fraud,insurance", help="any of fraud, insurance, images")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-folder", default="", help="folder with creditcard.csv and the CIFAR-10 archive")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    print(describe_hardware(), flush=True)
    studies = make_studies(arguments.data_folder)
    for name in arguments.studies.split(","):
        study = studies[name]
        _SHARED.update(study=study, prepared=Prepared(study, arguments.device), device=arguments.device)
        jobs = list(list_tuning_jobs(name, study))
        run_jobs(jobs, arguments.records, arguments.processes)
        run_jobs(list(choose_settings(read_records(arguments.records), jobs)), arguments.records, arguments.processes)


if __name__ == "__main__":
    main()
