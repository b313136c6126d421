"""Amplified SCAFFOLD (A-SCAFFOLD): control variates frozen over a period of P = K rounds, progress amplified.

    w_m ← w_m - η (g - c_m + c)          with c_m, c of the last period
    every P rounds: c_m ← mean raw gradient of m's local steps in the period (others keep theirs),
                    c ← mean of all N c_m,  x ← x_prev + γ (x - x_prev)

Crawshaw and Liu, Federated learning under periodic client participation and heterogeneous data, NeurIPS 2024. A client
is not told when a period ends, so it renews its variate at its next visit. At each visit it uploads the change of its
next variate, and the server adds up these changes until the period ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.algorithms._local import Method, amplify_progress
from fedauc.algorithms.scaffold import CorrectedSGD, Local, Shared
from fedauc.fields import option
from fedauc.interfaces import Cohort, Download, Model, Phase, Server, Setting, Upload
from fedauc.trees import Tree, is_empty, tree_add, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


class ClientState(NamedTuple):
    """The current variate, and the sum of raw gradients, the step count and the number of the period."""

    variate: Tensor
    total: Tensor
    steps: Tensor
    period: Tensor

    def next_variate(self) -> Tensor:
        """The variate of the next period: the mean gradient so far, or the current variate if there are no steps."""
        steps = self.steps[..., None]
        return torch.where(steps > 0, self.total / steps.clamp(min=1), self.variate)


class PeriodState(NamedTuple):
    """The model at the start of the period, and the change of c that is pending until its end."""

    start: Model
    pending: Tensor


@dataclass(frozen=True, kw_only=True)
class AScaffold(CorrectedSGD):
    """SCAFFOLD's local step; the variates change and the progress is amplified once per period."""

    name: ClassVar[str] = "a-scaffold"
    uploads_gradients_only: ClassVar[bool] = True
    amplify: float = option(1.5, "Factor on the progress of a cycle; 1 leaves it as it is.", above=0)

    def without_server_settings(self) -> AScaffold:
        """Only the server amplifies."""
        return replace(self, amplify=1.0)

    def init(self, setting: Setting, model: Model) -> Server:
        """c = 0, nothing is pending, and the first period starts from this model."""
        shared = Shared(model, torch.zeros_like(model.weights))
        return Server(shared=shared, anchor=shared, private=PeriodState(model, torch.zeros_like(model.weights)))

    def initial_client_state(self, download: Download) -> ClientState:
        """c_m = 0, and the sum of this period is 0."""
        zero = torch.zeros_like(download.shared.variate)
        steps = torch.zeros(zero.shape[:-1], dtype=torch.int64, device=zero.device)
        return ClientState(zero, zero, steps, torch.full_like(steps, download.phase.cycle))

    def begin(self, download: Download, client_state: ClientState) -> Local:
        """Start from the model that was sent, with the current variate."""
        client_state = _start_new_period(download, client_state)
        return Local(download.shared.model, client_state.variate, torch.zeros_like(client_state.variate))

    def finish(self, download: Download, client_state: ClientState, local: Local, emitted: Tree) -> tuple[Upload, Tree]:
        """Add the gradients of the visit to those of the period, and upload the change of the next variate."""
        old = _start_new_period(download, client_state)
        new = old._replace(total=old.total + local.total, steps=old.steps + download.phase.local_steps)
        change = tree_sub(local.model, download.shared.model)
        return Upload(mean=Shared(change, new.next_variate() - old.next_variate())), new

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Average, and add up the changes of c; at the end of a cycle apply them and amplify the progress."""
        start, pending = server.private
        if phase.starts_stage:
            start = server.anchor.model
        model, variate = server.shared
        if not is_empty(reduced.mean):
            model = tree_add(model, reduced.mean.model)
            pending = pending + cohort.divisor / setting.client_count * reduced.mean.variate
        if phase.ends_cycle:
            start = model = amplify_progress(start, model, self.amplify)
            variate, pending = variate + pending, torch.zeros_like(pending)
        return server._replace(shared=Shared(model, variate), private=PeriodState(start, pending))


def _start_new_period(download: Download, client_state: ClientState) -> ClientState:
    """The client state in the period of this visit: renewed if it is from an earlier period."""
    period = torch.full_like(client_state.period, download.phase.cycle)
    ended = client_state.period != period
    zero = torch.zeros_like(client_state.total)
    return ClientState(
        torch.where(ended[..., None], client_state.next_variate(), client_state.variate),
        torch.where(ended[..., None], zero, client_state.total),
        torch.where(ended, 0, client_state.steps),
        period,
    )


METHODS = (Method("a-scaffold", AScaffold, "cyclic", 0.1, reference="Crawshaw and Liu 2024"),)
