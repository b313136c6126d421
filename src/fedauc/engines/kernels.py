"""Batched kernels: layers that run M clients' own weights at once, forward and backward, without autograd.

A kernel takes inputs `[M, B, ...]` and its parameters for all clients, each flat, `[M, n]`. Modules with other layers
are left to vmap (`batched.py`) or to the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedauc.interfaces import ForwardPass, Model, Network
from fedauc.models._layers import AddedBranches, ImageMean, InputScaling

Weights = Sequence[Tensor]
"""A layer's parameters, each `[M, n]`."""

Gradients = tuple[Tensor, list[Tensor]]
"""The derivative with respect to a layer's inputs (any tensor, for the first layer), and to each of its weights."""


class Unsupported(ValueError):
    """A module that cannot be stacked; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the batched engine cannot run this model: {reason}; use engine='auto' or 'loop'")
        self.reason = reason


class KernelNetwork(Network):
    """A chain of layers with batched kernels: no autograd, one call per layer and direction."""

    def __init__(self, module: nn.Module) -> None:
        self._kernels = build_kernels(module)
        self.lengths = [length for kernel in self._kernels for length in kernel.lengths]
        self._first = next(number for number, kernel in enumerate(self._kernels) if kernel.lengths)

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """Layer by layer forward; the pullback goes back through what each layer saved."""
        parameters = iter(torch.split(model.weights, self.lengths, dim=1))
        weights = [[next(parameters) for _ in kernel.lengths] for kernel in self._kernels]
        saved, outputs = [], inputs
        for kernel, layer_weights in zip(self._kernels, weights, strict=True):
            outputs, layer_saved = kernel.run_forward(layer_weights, outputs)
            saved.append(layer_saved)
        single = outputs.shape[-1] == 1

        def pullback(cotangent: Tensor) -> Tensor:
            slope = cotangent[..., None] if single else cotangent
            gradients: list[Tensor] = []
            for number in range(len(self._kernels) - 1, self._first - 1, -1):
                kernel, is_first = self._kernels[number], number == self._first
                slope, layer_gradients = kernel.run_backward(weights[number], saved[number], slope, is_first)
                gradients = layer_gradients + gradients
            return torch.cat(gradients, dim=1)

        return ForwardPass(outputs[..., 0] if single else outputs, model.buffers, pullback)


class Kernel(ABC):
    """One layer for a stacked cohort. `lengths` are the sizes of its parameters, per client."""

    lengths: tuple[int, ...] = ()

    @abstractmethod
    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """The outputs, and what `run_backward` needs."""

    @abstractmethod
    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """The derivatives, from the one with respect to the outputs; `first` layers need none for their inputs."""


class LinearKernel(Kernel):
    """y = x Wᵀ + b, one batched matrix product each way."""

    def __init__(self, layer: nn.Linear) -> None:
        self._shape = (layer.out_features, layer.in_features)
        self.lengths = _parameter_lengths(layer)

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in]` to `[M, B, out]`."""
        matrix, biases = self._view_matrix(weights).mT, weights[1:]
        if biases and not torch.compiler.is_compiling():
            return torch.baddbmm(biases[0][:, None], inputs, matrix), inputs
        # A compiler fuses the addition of the bias with the next operation.
        return _add_bias(torch.bmm(inputs, matrix), biases), inputs

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """∂W = ∂yᵀ x, ∂b = Σ ∂y, ∂x = ∂y W."""
        gradients = [torch.bmm(slope.mT, saved).flatten(1), *(slope.sum(1) for _ in weights[1:])]
        return slope if first else torch.bmm(slope, self._view_matrix(weights)), gradients

    def _view_matrix(self, weights: Weights) -> Tensor:
        return weights[0].view(-1, *self._shape)


class ScoreKernel(Kernel):
    """A linear layer with one output. A compiler gets sums of products, which it fuses with the layers around."""

    def __init__(self, layer: nn.Linear) -> None:
        self.lengths = _parameter_lengths(layer)

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in]` to `[M, B, 1]`."""
        row = weights[0][:, None]
        if torch.compiler.is_compiling():
            return _add_bias((inputs * row).sum(-1, keepdim=True), weights[1:]), inputs
        # Takes half the time of inputs times a column, and stores no products.
        return _add_bias(torch.bmm(row, inputs.mT).mT, weights[1:]), inputs

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """∂w = Σ ∂y x, ∂b = Σ ∂y, ∂x = ∂y w."""
        compiling = torch.compiler.is_compiling()
        row = (slope * saved).sum(1) if compiling else torch.bmm(slope.mT, saved)[:, 0]
        return slope if first else slope * weights[0][:, None], [row, *(slope.sum(1) for _ in weights[1:])]


class ElementwiseKernel(Kernel):
    """An activation whose derivative is a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function, self._slope = function, slope

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """The activation."""
        outputs = self._function(inputs)
        return outputs, outputs

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """The derivative at the saved outputs."""
        return self._slope(saved, slope), []


class FlattenKernel(Kernel):
    """Flattens all but the first two dimensions."""

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, ...]` to `[M, B, n]`."""
        return inputs.flatten(2), inputs.shape

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """Back to the inputs' shape."""
        return slope.view(saved), []


class ScaleKernel(Kernel):
    """Maps uint8 images to (x / 255 - shift) / scale; leaves floats as they are."""

    def __init__(self, layer: InputScaling) -> None:
        self._layer, self._dtype = layer, next(layer.parameters()).dtype

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """Floats of the weights' dtype."""
        if inputs.dtype != torch.uint8:
            return inputs, ()
        images = inputs.to(self._dtype) / 255
        return images if self._layer.divides_only else (images - self._layer.shift) / self._layer.scale, ()

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """This layer has no weights and comes first."""
        return slope, []


class ConvKernel(Kernel):
    """A convolution, client by client: on a CPU one grouped convolution for all clients is slower."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self._shape, self.lengths = layer.weight.shape, _parameter_lengths(layer)
        # In the order of aten's arguments: stride, padding, dilation, transposed, output padding, groups.
        self._options = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, in, H, W]` to `[M, B, out, H', W']`."""
        filters = self._view_matrix(weights)
        biases = weights[1] if weights[1:] else [None] * len(filters)
        visits = zip(inputs, filters, biases, strict=True)
        return torch.stack([torch.ops.aten.convolution(*visit, *self._options) for visit in visits]), inputs

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """The adjoint convolutions."""
        biased = len(weights) > 1
        biases, needed = [slope.shape[2]] if biased else None, (not first, True, biased)
        visits = zip(slope, saved, self._view_matrix(weights), strict=True)
        derivatives = [torch.ops.aten.convolution_backward(*visit, biases, *self._options, needed) for visit in visits]
        below, filters, shifts = zip(*derivatives, strict=True)
        gradients = [torch.stack(filters).flatten(1), *(torch.stack(shifts) for _ in weights[1:])]
        return slope if first else torch.stack(below), gradients

    def _view_matrix(self, weights: Weights) -> Tensor:
        return weights[0].view(-1, *self._shape)


class GroupNormKernel(Kernel):
    """Normalizes all clients' images at once, then applies each client's own scale and shift."""

    def __init__(self, layer: nn.GroupNorm) -> None:
        self._groups, self._channels, self._eps = layer.num_groups, layer.num_channels, layer.eps
        self.lengths = _parameter_lengths(layer)

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, C, ...]` to the same shape."""
        images = inputs.flatten(0, 1)
        normal, mean, rstd = torch.ops.aten.native_group_norm(images, None, None, *self._list_sizes(images), self._eps)
        normal = normal.view(inputs.shape)
        if not weights:
            return normal, (normal, images, mean, rstd)
        scale, shift = (self._broadcast_channels(part, inputs) for part in weights)
        return normal * scale + shift, (normal, images, mean, rstd)

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """∂scale = Σ ∂y x̂, ∂shift = Σ ∂y, and the adjoint of the norm."""
        normal, images, mean, rstd = saved
        gradients = []
        if weights:
            axes = [axis for axis in range(1, slope.ndim) if axis != 2]
            gradients = [(slope * normal).sum(axes), slope.sum(axes)]
            slope = slope * self._broadcast_channels(weights[0], slope)
        if first:
            return slope, gradients
        sizes, outputs = self._list_sizes(images), (True, False, False)
        flat = slope.flatten(0, 1)
        below = torch.ops.aten.native_group_norm_backward(flat, images, mean, rstd, None, *sizes, outputs)[0]
        return below.view(slope.shape), gradients

    def _list_sizes(self, images: Tensor) -> tuple[int, int, int, int]:
        return len(images), self._channels, images[0, 0].numel(), self._groups

    def _broadcast_channels(self, part: Tensor, like: Tensor) -> Tensor:
        return part.view(len(part), 1, self._channels, *[1] * (like.ndim - 3))


class PoolKernel(Kernel):
    """A mean over windows or over the whole image; it has no weights, so all clients are one batch."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """`[M, B, C, H, W]` to `[M, B, C, ...]`."""
        outputs = self._layer(inputs.flatten(0, 1))
        return outputs.view(*inputs.shape[:2], *outputs.shape[1:]), inputs

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """Spread evenly over the pixels that were averaged."""
        layer, images = self._layer, saved.flatten(0, 1)
        if not isinstance(layer, nn.AvgPool2d):
            height, width = saved.shape[-2:]
            return (slope / (height * width))[..., None, None].expand(saved.shape), []
        shape = (_as_pair(layer.kernel_size), _as_pair(layer.stride), _as_pair(layer.padding))
        rest = (layer.ceil_mode, layer.count_include_pad, layer.divisor_override)
        below = torch.ops.aten.avg_pool2d_backward(slope.flatten(0, 1), images, *shape, *rest)
        return below.view(saved.shape), []


class BranchesKernel(Kernel):
    """The sum of several chains of kernels on the same inputs; an empty chain passes them on unchanged."""

    def __init__(self, branches: Sequence[Sequence[Kernel]]) -> None:
        self._branches = branches
        self.lengths = tuple(length for branch in branches for kernel in branch for length in kernel.lengths)

    def run_forward(self, weights: Weights, inputs: Tensor) -> tuple[Tensor, Any]:
        """Each branch forward, and the sum of their outputs."""
        saved, total = [], None
        for branch, branch_weights in zip(self._branches, self._divide_weights(weights), strict=True):
            outputs, branch_saved = inputs, []
            for kernel, layer_weights in zip(branch, branch_weights, strict=True):
                outputs, layer_saved = kernel.run_forward(layer_weights, outputs)
                branch_saved.append(layer_saved)
            saved.append(branch_saved)
            total = outputs if total is None else total + outputs
        assert total is not None
        return total, saved

    def run_backward(self, weights: Weights, saved: Any, slope: Tensor, first: bool) -> Gradients:
        """Each branch backward from the same derivative; those with respect to the inputs are added."""
        gradients: list[Tensor] = []
        below: Tensor | None = None
        branches = zip(self._branches, self._divide_weights(weights), saved, strict=True)
        for branch, branch_weights, branch_saved in branches:
            branch_slope, branch_gradients = slope, list[Tensor]()
            for number in range(len(branch) - 1, -1, -1):
                is_first = first and number == 0
                layer = (branch_weights[number], branch_saved[number], branch_slope, is_first)
                branch_slope, layer_gradients = branch[number].run_backward(*layer)
                branch_gradients = layer_gradients + branch_gradients
            gradients += branch_gradients
            if not first:
                below = branch_slope if below is None else below + branch_slope
        return slope if below is None else below, gradients

    def _divide_weights(self, weights: Weights) -> list[list[list[Tensor]]]:
        """The weights of each layer of each branch."""
        remaining = iter(weights)
        return [[[next(remaining) for _ in kernel.lengths] for kernel in branch] for branch in self._branches]


def _parameter_lengths(layer: nn.Module) -> tuple[int, ...]:
    return tuple(parameter.numel() for parameter in layer.parameters())


def _add_bias(outputs: Tensor, biases: Weights) -> Tensor:
    """`[M, B, out]` with each client's bias, if there is one."""
    return outputs + biases[0][:, None] if biases else outputs


def _as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def build_kernels(module: nn.Module) -> list[Kernel]:
    """The kernels of a chain of layers, in the order of its parameters; raises Unsupported for anything else."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise Unsupported(f"{name} is frozen")
    kernels = list(_walk_layers(module))
    if sum(sum(kernel.lengths) for kernel in kernels) != sum(parameter.numel() for parameter in module.parameters()):
        raise Unsupported("its layers share weights")
    return kernels


def _walk_layers(module: nn.Module) -> Iterator[Kernel]:
    kind = type(module)
    if isinstance(module, InputScaling):
        yield ScaleKernel(module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"{kind.__name__} has hooks")
    if kind in (nn.Sequential, InputScaling):
        # Not children(), which skips a layer that is used a second time.
        for child in module._modules.values():
            if child is not None:
                yield from _walk_layers(child)
    elif isinstance(module, AddedBranches):
        yield BranchesKernel([list(_walk_layers(branch)) for branch in module.branches])
    elif kind is not nn.Identity:
        yield _make_kernel(module)


def _make_kernel(module: nn.Module) -> Kernel:
    kind = type(module)
    if kind in ACTIVATIONS:
        return ElementwiseKernel(*ACTIVATIONS[kind])
    if kind in LAYERS:
        return LAYERS[kind](module)
    raise Unsupported(f"{kind.__name__} has no batched kernel")


def _make_linear_kernel(layer: nn.Linear) -> Kernel:
    return ScoreKernel(layer) if layer.out_features == 1 else LinearKernel(layer)


def _make_conv_kernel(layer: nn.Conv2d) -> Kernel:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise Unsupported(f"Conv2d with padding {layer.padding!r} of {layer.padding_mode} has no batched kernel")
    return ConvKernel(layer)


def _make_flatten_kernel(layer: nn.Flatten) -> Kernel:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise Unsupported(f"Flatten from {layer.start_dim} to {layer.end_dim} has no batched kernel")
    return FlattenKernel()


LAYERS: dict[type[nn.Module], Callable[[Any], Kernel]] = {
    nn.Linear: _make_linear_kernel,
    nn.Conv2d: _make_conv_kernel,
    nn.GroupNorm: GroupNormKernel,
    nn.AvgPool2d: PoolKernel,
    ImageMean: PoolKernel,
    nn.Flatten: _make_flatten_kernel,
}

ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (F.relu, lambda outputs, slope: torch.ops.aten.threshold_backward(slope, outputs, 0)),
    nn.Tanh: (torch.tanh, lambda outputs, slope: torch.ops.aten.tanh_backward(slope, outputs)),
    nn.Sigmoid: (torch.sigmoid, lambda outputs, slope: torch.ops.aten.sigmoid_backward(slope, outputs)),
}
