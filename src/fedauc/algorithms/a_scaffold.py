"""Amplified SCAFFOLD (A-SCAFFOLD): control variates frozen over a period of P = K rounds, progress amplified.

    w_m ← w_m - η (g - c_m + c)          with c_m, c of the last period
    every P rounds: c_m ← mean raw gradient of m's local steps in the period (others keep theirs),
                    c ← mean of all N c_m,  x ← x_prev + γ (x - x_prev)

Crawshaw and Liu, Federated learning under periodic client participation and heterogeneous data, NeurIPS 2024. A client
does not hear of a period's end, so it rolls its variate over when it is next visited; it uploads by how much each visit
moves its coming variate, and the server collects those moves until the period ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc.algorithms._local import amplify_progress, check_amplify
from fedauc.algorithms._method import Method
from fedauc.algorithms.scaffold import CorrectedSGD, Local, Shared
from fedauc.interfaces import Cohort, Download, Model, Phase, Server, Setting, Upload
from fedauc.trees import Tree, is_empty, tree_add, tree_sub


class ClientState(NamedTuple):
    """The variate in force, and the period's running sum of raw gradients, step count and number."""

    variate: Tensor
    total: Tensor
    steps: Tensor
    period: Tensor

    def next_variate(self) -> Tensor:
        """The variate that the period's end will bring: the mean so far, or the one in force if there is none."""
        steps = self.steps[..., None]
        return torch.where(steps > 0, self.total / steps.clamp(min=1), self.variate)


class PeriodState(NamedTuple):
    """The model at the period's start and the collected change of c."""

    start: Model
    pending: Tensor


@final
@dataclass(frozen=True, kw_only=True)
class AScaffold(CorrectedSGD):
    """SCAFFOLD's step; variates and model move by periods."""

    name: ClassVar[str] = "a-scaffold"
    amplify: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amplify(self.amplify)

    def without_server_settings(self) -> AScaffold:
        """Amplification is the server's."""
        return replace(self, amplify=1.0)

    def init(self, setting: Setting, model: Model) -> Server:
        """c = 0, nothing pending, the first period starts here."""
        shared = Shared(model, torch.zeros_like(model.weights))
        return Server(shared=shared, anchor=shared, private=PeriodState(model, torch.zeros_like(model.weights)))

    def initial_client_state(self, download: Download) -> ClientState:
        """c_m is 0 at first, and nothing has been summed in this period."""
        zero = torch.zeros_like(download.shared.variate)
        steps = torch.zeros(zero.shape[:-1], dtype=torch.int64, device=zero.device)
        return ClientState(zero, zero, steps, torch.full_like(steps, download.phase.cycle))

    def begin(self, download: Download, client_state: ClientState) -> Local:
        """Use the variate in force."""
        client_state = _start_new_period(download, client_state)
        return Local(download.shared.model, client_state.variate, torch.zeros_like(client_state.variate))

    def finish(self, download: Download, client_state: ClientState, local: Local, emitted: Tree) -> tuple[Upload, Tree]:
        """Add the visit to the period's mean, and send by how much that moves it."""
        before = _start_new_period(download, client_state)
        after = before._replace(total=before.total + local.total, steps=before.steps + download.phase.local_steps)
        change = tree_sub(local.model, download.shared.model)
        return Upload(mean=Shared(change, after.next_variate() - before.next_variate())), after

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Average and collect; at the end of a cycle c moves and the progress is amplified."""
        start, pending = server.private
        if phase.starts_stage:
            start = server.anchor.model
        model, variate = server.shared
        if not is_empty(reduced.mean):
            model = tree_add(model, reduced.mean.model)
            pending = pending + len(cohort.clients) / setting.client_count * reduced.mean.variate
        if phase.ends_cycle:
            start = model = amplify_progress(start, model, self.amplify)
            variate, pending = variate + pending, torch.zeros_like(pending)
        return server._replace(shared=Shared(model, variate), private=PeriodState(start, pending))


def _start_new_period(download: Download, client_state: ClientState) -> ClientState:
    """The memory at this visit: rolled over when the period it speaks of has ended."""
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
