"""A personal head: the last layers of the model stay at each client, and only the layers below them are averaged.

    w_m = (body, head_m):   a visit starts from the body that was sent and from the head that the client has kept;
                            the change of the body is uploaded, with zeros for the head, and head_m stays

Arivazhagan et al., Federated learning with personalization layers, 2019. A client's first head is that of the initial
model, which the server keeps. Control variates are zero for the head, so that it takes plain local steps; proximal
terms pull it towards the initial head; duals are shared as before.

What is evaluated: the rows of a client that has been visited are scored with the body and this client's head, all other
rows with the body and the initial head. The model that a run ends with has the initial head. In a federation the heads
stay at the sites, so the server does not evaluate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, final

import torch

from fedauc.fields import option
from fedauc.interfaces import Algorithm, Download, Model, Upload, Wrapper
from fedauc.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class PersonalHead(Wrapper):
    """Keeps the last layers of the model as each client's state."""

    name: ClassVar[str] = "personal-head"
    layers: int = option(1, "Number of layers at the end of the model that stay at the client.", at_least=1)

    def bind(self, parameters: Mapping[str, int]) -> _BoundHead:
        """Count the parameters of the last layers; those of one layer belong to the same module."""
        modules = groupby(parameters, key=lambda name: name.rpartition(".")[0])
        lengths = [sum(parameters[name] for name in names) for _, names in modules]
        if self.layers >= len(lengths):
            raise ValueError(
                f"personal-head.layers is {self.layers}; it must be below the {len(lengths)} layers of the model, so "
                "that a body is left to average: lower it, or use a deeper model such as mlp"
            )
        return _BoundHead(length=sum(lengths[-self.layers :]))


@final
@dataclass(frozen=True, kw_only=True)
class _BoundHead(Wrapper):
    """The head is the last `length` entries of the weights."""

    has_personal_models: ClassVar[bool] = True
    uploads_gradients_only: ClassVar[bool] = True
    length: int

    def initial_client_state(self, inner: Algorithm, download: Download) -> Tensor:
        """The head of the initial model, which the server never changes."""
        return inner.extract_model(download.shared).weights[..., -self.length :]

    def begin(self, inner: Algorithm, download: Download, local: Tree, client_state: Tensor) -> tuple[Tree, Tree]:
        """Put the client's head on the body that was sent; control variates are zero for the head."""
        model = inner.local_model(local)
        weights = torch.cat([model.weights[..., : -self.length], client_state], -1)
        return inner.replace_local_model(self._clear_head(local, weights), model._replace(weights=weights)), ()

    def finish(
        self, inner: Algorithm, upload: Upload, local: Tree, carried: Tree, client_state: Tensor
    ) -> tuple[Upload, Tensor]:
        """Upload zeros for the head, and keep it."""
        weights = inner.local_model(local).weights
        # A view would keep all weights in memory.
        head = weights[..., -self.length :].clone()
        return upload._replace(mean=self._clear_head(upload.mean, weights)), head

    def personal_model(self, model: Model, client_state: Tensor) -> Model:
        """The model with the client's head."""
        return model._replace(weights=torch.cat([model.weights[..., : -self.length], client_state], -1))

    def _clear_head(self, tree: Tree, like: Tensor) -> Tree:
        """The tree with zeros for the head in every vector of the shape of the weights; buffers stay."""
        if isinstance(tree, Model):
            return tree._replace(weights=self._clear_head(tree.weights, like))
        if isinstance(tree, torch.Tensor):
            if tree.shape != like.shape:
                return tree
            return torch.cat([tree[..., : -self.length], torch.zeros_like(tree[..., -self.length :])], -1)
        children = [self._clear_head(child, like) for child in tree]
        return tuple(children) if type(tree) is tuple else type(tree)(*children)
