"""FedAvg: local SGD, then an average.

    w_m ← w;  repeat I times: w_m ← w_m - η ∇ℓ(w_m; batch);  w ← Σ_m weight_m w_m

McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017. Under the
cyclic schedule it is CyCp-FedAvg (Cho et al., On the convergence of federated averaging with cyclic client
participation, ICML 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.algorithms._local import Method, PointAlgorithm, apply_mean_change, point_gradient, point_loss, sgd_step
from fedauc.interfaces import Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.focal import Focal
from fedauc.objectives.logistic import Logistic
from fedauc.server_optimizers.adaptive import Adam
from fedauc.trees import Tree, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LocalSGD(PointAlgorithm):
    """What clients do: local SGD on a loss of single examples."""

    def begin(self, download: Download, client_state: Tree) -> Model:
        """Start from the model that was sent."""
        model: Model = download.shared
        return model

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        """w ← w - η ∇ℓ."""
        gradient = point_gradient(self.objective, network, local, batch)
        weights = sgd_step(local.weights, gradient.weights, download.phase.learning_rate, self.weight_decay)
        return Model(weights, gradient.buffers), ()

    def monitored_loss(self, network: Network, download: Download, local: Model, batch: Batch) -> Tensor:
        """The loss of the batch."""
        return point_loss(self.objective, network, local, batch)

    def finish(self, download: Download, client_state: Tree, local: Model, emitted: Tree) -> tuple[Upload, Tree]:
        """Upload the change of the model; the client keeps nothing."""
        return Upload(mean=tree_sub(local, download.shared)), ()

    def extract_model(self, shared: Model) -> Model:
        """The shared state is the model."""
        return shared


@dataclass(frozen=True, kw_only=True)
class FedAvg(LocalSGD):
    """Local SGD; the server averages the models."""

    name: ClassVar[str] = "fedavg"
    uploads_gradients_only: ClassVar[bool] = True

    def init(self, setting: Setting, model: Model) -> Server:
        """The server holds the model and nothing else."""
        return Server(shared=model, anchor=model)

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Add the mean change to the model."""
        return server._replace(shared=apply_mean_change(server.shared, reduced))


METHODS = (
    Method("cycp-fedavg", FedAvg, "cyclic", 0.1, reference="Cho et al. 2023"),
    Method("fedavg", FedAvg, "uniform", 0.1, reference="McMahan et al. 2017"),
    Method(
        "cycp-fedavg-balanced",
        FedAvg,
        "cyclic",
        0.1,
        (("objective", Logistic(draw="classes")),),
        "logistic loss on batches of as many positives as negatives",
    ),
    Method("cycp-fedavg-focal", FedAvg, "cyclic", 0.1, (("objective", Focal()),), "Lin et al. 2017"),
    Method(
        "cycp-fedadam",
        FedAvg,
        "cyclic",
        0.1,
        reference="Reddi et al. 2021",
        settings=(("server_optimizer", Adam(learning_rate=0.1)),),
    ),
)
