"""Amplified FedAvg (A-FedAvg): FedAvg whose progress over a period of P = K rounds is amplified.

    every round:   FedAvg
    every P rounds: x ← x_prev + γ (x - x_prev),  x_prev ← x

Wang and Ji, A unified analysis of federated learning with arbitrary client participation, NeurIPS 2022. With γ = 1 it
is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedauc.algorithms._local import Method, amplify_progress, apply_mean_change
from fedauc.algorithms.fedavg import FedAvg, LocalSGD
from fedauc.fields import option
from fedauc.interfaces import Cohort, Model, Phase, Server, Setting, Upload


@dataclass(frozen=True, kw_only=True)
class AFedAvg(LocalSGD):
    """FedAvg at the client; the server also keeps the model at the start of the period."""

    name: ClassVar[str] = "a-fedavg"
    uploads_gradients_only: ClassVar[bool] = True
    amplify: float = option(1.5, "Factor on the progress of a cycle; 1 leaves it as it is.", above=0)

    def without_server_settings(self) -> FedAvg:
        """FedAvg, because only the server amplifies."""
        return FedAvg(objective=self.objective, weight_decay=self.weight_decay)

    def init(self, setting: Setting, model: Model) -> Server:
        """The first period starts from this model."""
        return Server(shared=model, anchor=model, private=model)

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Average, and amplify at the end of a cycle. A stage starts a new period, as it may have moved the model."""
        start = server.anchor if phase.starts_stage else server.private
        shared = apply_mean_change(server.shared, reduced)
        if phase.ends_cycle:
            start = shared = amplify_progress(start, shared, self.amplify)
        return server._replace(shared=shared, private=start)


METHODS = (Method("a-fedavg", AFedAvg, "cyclic", 0.1, reference="Wang and Ji 2022"),)
