"""Batched kernels: layers that run M clients' own weights at once, forward and backward, without autograd.

A kernel sees inputs `[M, B, ...]` and its slice of the stacked weights `[M, n]`. What has no kernel here is left to
vmap, or to the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedauc.models.model import Scale


class Unsupported(ValueError):
    """A module that cannot be stacked; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the batched engine cannot run this model: {reason}; use engine='auto' or 'loop'")
        self.reason = reason


class Kernel(ABC):
    """One layer for a stacked cohort. `size` is its number of weights per client."""

    size: int = 0

    @abstractmethod
    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """Outputs, and what `backward` needs."""

    @abstractmethod
    def backward(self, weights: Tensor, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The inputs' derivative (anything, for the first layer) and the weights', flat `[M, n]`, in their order."""


class LinearKernel(Kernel):
    """y = x Wᵀ + b, one batched matrix product each way."""

    def __init__(self, layer: nn.Linear) -> None:
        self._shape = (layer.out_features, layer.in_features)
        self._bias = layer.bias is not None
        self._matrix = layer.out_features * layer.in_features
        self.size = self._matrix + (layer.out_features if self._bias else 0)

    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in]` to `[M, B, out]`."""
        matrix = self._view(weights)
        if not self._bias:
            return torch.bmm(inputs, matrix.mT), inputs
        return torch.baddbmm(weights[:, None, self._matrix :], inputs, matrix.mT), inputs

    def backward(self, weights: Tensor, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """∂W = ∂yᵀ x, ∂b = Σ ∂y, ∂x = ∂y W."""
        gradients = [torch.bmm(slope.mT, saved).flatten(1)]
        if self._bias:
            gradients.append(slope.sum(1))
        return slope if first else torch.bmm(slope, self._view(weights)), gradients

    def _view(self, weights: Tensor) -> Tensor:
        return weights[:, : self._matrix].view(len(weights), *self._shape)


class ScoreKernel(Kernel):
    """A linear layer with one output: a sum of products, which a compiler fuses with what comes before and after."""

    def __init__(self, layer: nn.Linear) -> None:
        self._inputs = layer.in_features
        self._bias = layer.bias is not None
        self.size = layer.in_features + self._bias

    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in]` to `[M, B, 1]`."""
        outputs = (inputs * weights[:, None, : self._inputs]).sum(-1, keepdim=True)
        return outputs + weights[:, None, self._inputs :] if self._bias else outputs, inputs

    def backward(self, weights: Tensor, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """∂w = Σ ∂y x, ∂b = Σ ∂y, ∂x = ∂y w."""
        gradients = [(slope * saved).sum(1)]
        if self._bias:
            gradients.append(slope.sum(1))
        return slope if first else slope * weights[:, None, : self._inputs], gradients


class Elementwise(Kernel):
    """An activation whose slope follows from its output."""

    def __init__(self, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function, self._slope = function, slope

    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """The activation."""
        outputs = self._function(inputs)
        return outputs, outputs

    def backward(self, weights: Tensor, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The slope at the saved outputs."""
        return self._slope(saved, slope), []


class FlattenKernel(Kernel):
    """All but the first two dimensions into one."""

    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, ...]` to `[M, B, n]`."""
        return inputs.flatten(2), inputs.shape

    def backward(self, weights: Tensor, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The old shape."""
        return slope.view(saved), []


class ScaleKernel(Kernel):
    """uint8 images to [0, 1]; floats as they are."""

    def forward(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        """Floats of the weights' type."""
        return inputs.to(weights.dtype) / 255 if inputs.dtype == torch.uint8 else inputs, ()

    def backward(self, weights: Tensor, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """Nothing to learn here."""
        return slope, []


def kernels(module: nn.Module) -> list[Kernel]:
    """The kernels of a chain of layers, in the order of its parameters; raises Unsupported for anything else."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise Unsupported(f"{name} is frozen")
    found = list(_walk(module))
    if sum(kernel.size for kernel in found) != sum(parameter.numel() for parameter in module.parameters()):
        raise Unsupported("its layers share weights")
    return found


def _walk(module: nn.Module) -> Iterator[Kernel]:
    kind = type(module)
    if kind is Scale:
        yield ScaleKernel()
    if module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"{kind.__name__} has hooks")
    if kind in (nn.Sequential, Scale):
        # Not children(), which leaves out a layer that is used a second time.
        for child in module._modules.values():
            if child is not None:
                yield from _walk(child)
    elif isinstance(module, nn.Linear) and kind is nn.Linear:
        yield ScoreKernel(module) if module.out_features == 1 else LinearKernel(module)
    elif kind in ACTIVATIONS:
        yield Elementwise(*ACTIVATIONS[kind])
    elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        yield FlattenKernel()
    elif kind is not nn.Identity:
        raise Unsupported(f"{kind.__name__} has no batched kernel")


ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (F.relu, lambda outputs, slope: torch.ops.aten.threshold_backward(slope, outputs, 0)),
    nn.Tanh: (torch.tanh, lambda outputs, slope: torch.ops.aten.tanh_backward(slope, outputs)),
    nn.Sigmoid: (torch.sigmoid, lambda outputs, slope: torch.ops.aten.sigmoid_backward(slope, outputs)),
}
