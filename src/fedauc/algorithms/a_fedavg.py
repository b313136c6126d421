"""Amplified FedAvg (A-FedAvg): FedAvg whose progress over a period of P = K rounds is amplified.

    every round:   FedAvg
    every P rounds: x ← x_prev + γ (x - x_prev),  x_prev ← x

Wang and Ji, A unified analysis of federated learning with arbitrary client participation, NeurIPS 2022. With γ = 1 it
is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedauc.algorithms._local import amplify_progress, apply_mean_change, check_amplify
from fedauc.algorithms._method import Method
from fedauc.algorithms.fedavg import FedAvg, LocalSGD
from fedauc.interfaces import Cohort, Model, Phase, Server, Setting, Upload


@final
@dataclass(frozen=True, kw_only=True)
class AFedAvg(LocalSGD):
    """FedAvg at the client; the server also keeps the model of the period's start."""

    name: ClassVar[str] = "a-fedavg"
    amplify: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amplify(self.amplify)

    def without_server_settings(self) -> FedAvg:
        """FedAvg: amplification is the server's."""
        return FedAvg(objective=self.objective, weight_decay=self.weight_decay)

    def init(self, setting: Setting, model: Model) -> Server:
        """The first period starts here."""
        return Server(shared=model, anchor=model, private=model)

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Average; amplify at the end of a cycle. A stage may have moved the model, so its first period starts anew."""
        start = server.anchor if phase.starts_stage else server.private
        shared = apply_mean_change(server.shared, reduced)
        if phase.ends_cycle:
            start = shared = amplify_progress(start, shared, self.amplify)
        return server._replace(shared=shared, private=start)


METHODS = (Method("a-fedavg", AFedAvg, "cyclic", 0.1, reference="Wang and Ji 2022"),)
