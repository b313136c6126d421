"""Batched kernels: layers that run M clients' own weights at once, forward and backward, without autograd.

A kernel sees inputs `[M, B, ...]` and its own parameters of the stack, each flat, `[M, n]`. What has no kernel here is
left to vmap, or to the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedauc.models._layers import ImageMean, InputScaling

Weights = Sequence[Tensor]
"""A layer's parameters, each `[M, n]`."""


class Unsupported(ValueError):
    """A module that cannot be stacked; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the batched engine cannot run this model: {reason}; use engine='auto' or 'loop'")
        self.reason = reason


class Kernel(ABC):
    """One layer for a stacked cohort. `lengths` are its parameters' numbers of weights per client."""

    lengths: tuple[int, ...] = ()

    @abstractmethod
    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """Outputs, and what `backward` needs."""

    @abstractmethod
    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The inputs' derivative (anything, for the first layer) and the weights', as these come."""


class LinearKernel(Kernel):
    """y = x Wᵀ + b, one batched matrix product each way."""

    def __init__(self, layer: nn.Linear) -> None:
        self._shape = (layer.out_features, layer.in_features)
        self.lengths = _lengths(layer)

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in]` to `[M, B, out]`."""
        matrix, biases = self._view(weights).mT, weights[1:]
        if biases and not torch.compiler.is_compiling():
            return torch.baddbmm(biases[0][:, None], inputs, matrix), inputs
        # A compiler adds the bias on the way to what comes next.
        return _shifted(torch.bmm(inputs, matrix), biases), inputs

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """∂W = ∂yᵀ x, ∂b = Σ ∂y, ∂x = ∂y W."""
        gradients = [torch.bmm(slope.mT, saved).flatten(1), *(slope.sum(1) for _ in weights[1:])]
        return slope if first else torch.bmm(slope, self._view(weights)), gradients

    def _view(self, weights: Weights) -> Tensor:
        return weights[0].view(-1, *self._shape)


class ScoreKernel(Kernel):
    """A linear layer with one output. A compiler gets sums of products, to fuse with what comes before and after."""

    def __init__(self, layer: nn.Linear) -> None:
        self.lengths = _lengths(layer)

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in]` to `[M, B, 1]`."""
        row = weights[0][:, None]
        if torch.compiler.is_compiling():
            return _shifted((inputs * row).sum(-1, keepdim=True), weights[1:]), inputs
        # Half the time of inputs times a column, and no products are written down.
        return _shifted(torch.bmm(row, inputs.mT).mT, weights[1:]), inputs

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """∂w = Σ ∂y x, ∂b = Σ ∂y, ∂x = ∂y w."""
        compiling = torch.compiler.is_compiling()
        row = (slope * saved).sum(1) if compiling else torch.bmm(slope.mT, saved)[:, 0]
        return slope if first else slope * weights[0][:, None], [row, *(slope.sum(1) for _ in weights[1:])]


class Elementwise(Kernel):
    """An activation whose slope follows from its output."""

    def __init__(self, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function, self._slope = function, slope

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """The activation."""
        outputs = self._function(inputs)
        return outputs, outputs

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The slope at the saved outputs."""
        return self._slope(saved, slope), []


class FlattenKernel(Kernel):
    """All but the first two dimensions into one."""

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, ...]` to `[M, B, n]`."""
        return inputs.flatten(2), inputs.shape

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The old shape."""
        return slope.view(saved), []


class ScaleKernel(Kernel):
    """uint8 images to (x / 255 - shift) / scale; floats as they are."""

    def __init__(self, layer: InputScaling) -> None:
        self._layer, self._dtype = layer, next(layer.parameters()).dtype

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """Floats of the weights' type."""
        if inputs.dtype != torch.uint8:
            return inputs, ()
        images = inputs.to(self._dtype) / 255
        return images if self._layer.divides_only else (images - self._layer.shift) / self._layer.scale, ()

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """Nothing to learn here."""
        return slope, []


class ConvKernel(Kernel):
    """A convolution, client by client: on a CPU a grouped one for all clients is slower."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self._shape, self.lengths = layer.weight.shape, _lengths(layer)
        # As aten takes them: stride, padding, dilation, transposed, output padding, groups.
        self._how = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in, H, W]` to `[M, B, out, H', W']`."""
        filters = self._view(weights)
        biases = weights[1] if weights[1:] else [None] * len(filters)
        visits = zip(inputs, filters, biases, strict=True)
        return torch.stack([torch.ops.aten.convolution(*visit, *self._how) for visit in visits]), inputs

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """The adjoint convolutions."""
        biased = len(weights) > 1
        biases, wanted = [slope.shape[2]] if biased else None, (not first, True, biased)
        visits = zip(slope, saved, self._view(weights), strict=True)
        found = [torch.ops.aten.convolution_backward(*visit, biases, *self._how, wanted) for visit in visits]
        below, filters, shifts = zip(*found, strict=True)
        gradients = [torch.stack(filters).flatten(1), *(torch.stack(shifts) for _ in weights[1:])]
        return slope if first else torch.stack(below), gradients

    def _view(self, weights: Weights) -> Tensor:
        return weights[0].view(-1, *self._shape)


class GroupNormKernel(Kernel):
    """Each image's groups of channels to mean 0 and variance 1, all clients at once; then each client's own affine."""

    def __init__(self, layer: nn.GroupNorm) -> None:
        self._groups, self._channels, self._eps = layer.num_groups, layer.num_channels, layer.eps
        self.lengths = _lengths(layer)

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, C, ...]`, the shape kept."""
        images = inputs.flatten(0, 1)
        normal, mean, rstd = torch.ops.aten.native_group_norm(images, None, None, *self._sizes(images), self._eps)
        normal = normal.view(inputs.shape)
        if not weights:
            return normal, (normal, images, mean, rstd)
        scale, shift = (self._wide(part, inputs) for part in weights)
        return normal * scale + shift, (normal, images, mean, rstd)

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """∂scale = Σ ∂y x̂, ∂shift = Σ ∂y, and the adjoint of the norm."""
        normal, images, mean, rstd = saved
        gradients = []
        if weights:
            others = [place for place in range(1, slope.ndim) if place != 2]
            gradients = [(slope * normal).sum(others), slope.sum(others)]
            slope = slope * self._wide(weights[0], slope)
        if first:
            return slope, gradients
        sizes, wanted = self._sizes(images), (True, False, False)
        flat = slope.flatten(0, 1)
        below = torch.ops.aten.native_group_norm_backward(flat, images, mean, rstd, None, *sizes, wanted)[0]
        return below.view(slope.shape), gradients

    def _sizes(self, images: Tensor) -> tuple[int, int, int, int]:
        return len(images), self._channels, images[0, 0].numel(), self._groups

    def _wide(self, part: Tensor, like: Tensor) -> Tensor:
        return part.view(len(part), 1, self._channels, *[1] * (like.ndim - 3))


class PoolKernel(Kernel):
    """A mean over windows, or over the whole image, which knows no clients."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, C, H, W]` to `[M, B, C, ...]`."""
        outputs = self._layer(inputs.flatten(0, 1))
        return outputs.view(*inputs.shape[:2], *outputs.shape[1:]), inputs

    def backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> tuple[Tensor, list[Tensor]]:
        """Shared out over what was averaged."""
        layer, images = self._layer, saved.flatten(0, 1)
        if not isinstance(layer, nn.AvgPool2d):
            height, width = saved.shape[-2:]
            return (slope / (height * width))[..., None, None].expand(saved.shape), []
        how = (_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding))
        rest = (layer.ceil_mode, layer.count_include_pad, layer.divisor_override)
        below = torch.ops.aten.avg_pool2d_backward(slope.flatten(0, 1), images, *how, *rest)
        return below.view(saved.shape), []


def _lengths(layer: nn.Module) -> tuple[int, ...]:
    return tuple(parameter.numel() for parameter in layer.parameters())


def _shifted(outputs: Tensor, biases: Weights) -> Tensor:
    """`[M, B, out]` with each client's bias, if there is one."""
    return outputs + biases[0][:, None] if biases else outputs


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def kernels(module: nn.Module) -> list[Kernel]:
    """The kernels of a chain of layers, in the order of its parameters; raises Unsupported for anything else."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise Unsupported(f"{name} is frozen")
    found = list(_walk(module))
    if sum(sum(kernel.lengths) for kernel in found) != sum(parameter.numel() for parameter in module.parameters()):
        raise Unsupported("its layers share weights")
    return found


def _walk(module: nn.Module) -> Iterator[Kernel]:
    kind = type(module)
    if isinstance(module, InputScaling):
        yield ScaleKernel(module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"{kind.__name__} has hooks")
    if kind in (nn.Sequential, InputScaling):
        # Not children(), which leaves out a layer that is used a second time.
        for child in module._modules.values():
            if child is not None:
                yield from _walk(child)
    elif kind is not nn.Identity:
        yield _kernel(module)


def _kernel(module: nn.Module) -> Kernel:
    kind = type(module)
    if kind in ACTIVATIONS:
        return Elementwise(*ACTIVATIONS[kind])
    if kind in LAYERS:
        return LAYERS[kind](module)
    raise Unsupported(f"{kind.__name__} has no batched kernel")


def _linear(layer: nn.Linear) -> Kernel:
    return ScoreKernel(layer) if layer.out_features == 1 else LinearKernel(layer)


def _convolution(layer: nn.Conv2d) -> Kernel:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise Unsupported(f"Conv2d with padding {layer.padding!r} of {layer.padding_mode} has no batched kernel")
    return ConvKernel(layer)


def _flatten(layer: nn.Flatten) -> Kernel:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise Unsupported(f"Flatten from {layer.start_dim} to {layer.end_dim} has no batched kernel")
    return FlattenKernel()


LAYERS: dict[type[nn.Module], Callable[[Any], Kernel]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: GroupNormKernel,
    nn.AvgPool2d: PoolKernel,
    ImageMean: PoolKernel,
    nn.Flatten: _flatten,
}

ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (F.relu, lambda outputs, slope: torch.ops.aten.threshold_backward(slope, outputs, 0)),
    nn.Tanh: (torch.tanh, lambda outputs, slope: torch.ops.aten.tanh_backward(slope, outputs)),
    nn.Sigmoid: (torch.sigmoid, lambda outputs, slope: torch.ops.aten.sigmoid_backward(slope, outputs)),
}
