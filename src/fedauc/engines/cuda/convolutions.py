"""Convolutions and norms for a stack of clients on a GPU, as few and as large operations as possible.

Convolutions with different weights have no good batched kernel (grouped ones leave the matrix units idle). Small ones
are one batched matrix product of all clients; large ones run at the same time, each client's on a stream of its own.
Other layers are elementwise or reductions, which the compiler fuses into one kernel for all clients. Images have their
channels last here: `[M, B, H, W, C]`, weights `[M, O, h, w, C]`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Result = TypeVar("Result")

MAX_COLUMN_BYTES = 24 << 20
"""Size of one client's image columns up to which a convolution is a matrix product; beyond, cuDNN is faster."""

COLUMN_MULTIPLE = 8
"""A matrix product's columns are padded to a multiple of this number."""

MAX_STREAMS = 32
"""Convolutions that may run at the same time."""


@torch.library.custom_op("fedauc::convolve", mutates_args=())
def convolve_clients(
    images: Tensor, weights: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """Convolve each client's images with its own weights: `[M, B, H', W', O]`."""

    def convolve_client(client: int) -> Tensor:
        client_images, client_weights = (_view_channels_first(tensor[client]) for tensor in (images, weights))
        outputs = nn.functional.conv2d(client_images, client_weights, None, stride, padding, dilation, groups)
        return outputs.permute(0, 2, 3, 1)

    return torch.stack(_run_on_streams(convolve_client, len(images), images.device))


@convolve_clients.register_fake
def _(
    images: Tensor, weights: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    kernel = weights.shape[2:4]
    sides = [
        (side + 2 * pad - gap * (size - 1) - 1) // step + 1
        for side, pad, gap, size, step in zip(images.shape[2:4], padding, dilation, kernel, stride, strict=True)
    ]
    return images.new_empty(*images.shape[:2], *sides, weights.shape[1])


@torch.library.custom_op("fedauc::convolve_back", mutates_args=())
def convolve_clients_backward(
    slopes: Tensor,
    images: Tensor,
    weights: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """The derivatives with respect to the images (empty, for a first layer) and to the weights."""

    def differentiate_client(client: int) -> tuple[Tensor, Tensor]:
        options = (None, stride, padding, dilation, False, [0, 0], groups, [not first, True, False])
        tensors = (_view_channels_first(tensor[client]) for tensor in (slopes, images, weights))
        by_images, by_weights, _ = torch.ops.aten.convolution_backward(*tensors, *options)
        return by_weights if first else by_images.permute(0, 2, 3, 1), by_weights.permute(0, 2, 3, 1)

    derivatives = _run_on_streams(differentiate_client, len(images), images.device)
    by_images = images.new_empty(0) if first else torch.stack([pair[0] for pair in derivatives])
    return by_images, torch.stack([pair[1] for pair in derivatives])


@convolve_clients_backward.register_fake
def _(
    slopes: Tensor,
    images: Tensor,
    weights: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    first: bool,
) -> tuple[Tensor, Tensor]:
    return images.new_empty(0 if first else images.shape), weights.new_empty(weights.shape)


class ClientConvolutions(torch.autograd.Function):
    """`convolve_clients` with its derivative, for torch.func and for autograd."""

    @staticmethod
    def forward(images: Tensor, weights: Tensor, *options: Any) -> Tensor:
        """Every client's convolution."""
        outputs: Tensor = convolve_clients(images, weights, *options)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the derivative needs."""
        images, weights, *ctx.options = inputs
        ctx.save_for_backward(images, weights)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        """Every client's derivatives."""
        images, weights = ctx.saved_tensors
        first = not ctx.needs_input_grad[0]
        gradients = convolve_clients_backward(slopes[0].contiguous(), images, weights, *ctx.options, first)
        return None if first else gradients[0], gradients[1], None, None, None, None


def _view_channels_first(images: Tensor) -> Tensor:
    """Channels first in shape, last in memory."""
    return images.permute(0, 3, 1, 2)


def _run_on_streams(run_client: Callable[[int], Result], count: int, device: torch.device) -> list[Result]:
    """Each client's result; on a GPU every client has a stream, which waits for the main stream and is waited for."""
    if device.type != "cuda":
        return [run_client(client) for client in range(count)]
    main = torch.cuda.current_stream(device)
    streams = _make_streams(device, main.cuda_stream)[:count]
    for stream in streams:
        stream.wait_stream(main)
    results = []
    for client in range(count):
        with torch.cuda.stream(streams[client % len(streams)]):
            results.append(run_client(client))
    for stream in streams:
        main.wait_stream(stream)
    return results


@functools.lru_cache(maxsize=64)
def _make_streams(device: torch.device, main_stream: int) -> list[torch.cuda.Stream]:
    """Streams for one main stream only: the convolutions of different main streams would wait for each other."""
    return [torch.cuda.Stream(device) for _ in range(MAX_STREAMS)]  # type: ignore[no-untyped-call]


class MappedConvolution(torch.autograd.Function):
    """One client's convolution, which vmap turns into all clients' convolutions."""

    @staticmethod
    def forward(images: Tensor, weights: Tensor, *options: Any) -> Tensor:
        """The convolution of a stack of one client."""
        outputs: Tensor = convolve_clients(images[None], weights[None], *options)[0]
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing to save: the derivative is that of `ClientConvolutions`."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """The convolutions of the whole stack."""
        stacks = [
            tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(inputs[:2], in_dims[:2], strict=True)
        ]
        outputs: Tensor = ClientConvolutions.apply(*(stack.contiguous() for stack in stacks), *inputs[2:])  # type: ignore[no-untyped-call]
        return outputs, 0


class KernelTaps(NamedTuple):
    """One side of a convolution: its input and output length, and the kernel's taps that ever meet a pixel."""

    side: int
    out: int
    first: int
    used: int
    stride: int
    padding: int
    dilation: int

    @staticmethod
    def find_used(side: int, size: int, stride: int, padding: int, dilation: int) -> KernelTaps:
        """The taps that meet a pixel; on small images the kernel's rim meets padding only and is left out."""
        out = (side + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        starts = [output * stride - padding for output in range(out)]
        used = [tap for tap in range(size) if any(0 <= start + tap * dilation < side for start in starts)] or [0]
        return KernelTaps(side, out, used[0], used[-1] - used[0] + 1, stride, padding, dilation)

    def list_pixels(self) -> np.ndarray:
        """The pixel that output `o` meets at tap `t`, `[out, used]`; outside the image where there is none."""
        taps = np.arange(self.used) + self.first
        return np.arange(self.out)[:, None] * self.stride - self.padding + taps * self.dilation

    def list_outputs(self) -> np.ndarray:
        """The output that meets pixel `h` at tap `t`, `[side, used]`; outside the range where there is none."""
        taps = np.arange(self.used) + self.first
        shifted = np.arange(self.side)[:, None] + self.padding - taps * self.dilation
        return np.where(shifted % self.stride == 0, shifted // self.stride, -1)


class PixelIndex(NamedTuple):
    """Positions in a flattened image, and which of them lie inside it."""

    positions: Tensor
    inside: Tensor

    @staticmethod
    def from_arrays(positions: np.ndarray, inside: np.ndarray, device: torch.device) -> PixelIndex:
        """The index on a device; positions outside the image become 0."""
        arrays = (np.where(inside, positions, 0), inside)
        return PixelIndex(*(torch.from_numpy(array.reshape(-1)).to(device) for array in arrays))

    def take_pixels(self, pixels: Tensor) -> Tensor:
        """Pixels `[N, positions, C]` out of `[N, pixels, C]`, zero outside the image."""
        taken = pixels.index_select(1, self.positions)
        return torch.where(self.inside[:, None], taken, torch.zeros((), dtype=taken.dtype, device=taken.device))


@functools.lru_cache(maxsize=256)
def _index_pixels(rows: KernelTaps, columns: KernelTaps, device: torch.device) -> PixelIndex:
    """The pixel that every output meets at every tap: `[H', W', h, w]` positions."""
    down, across = rows.list_pixels()[:, None, :, None], columns.list_pixels()[None, :, None, :]
    inside = _is_within(down, rows.side) & _is_within(across, columns.side)
    return PixelIndex.from_arrays(down * columns.side + across, inside, device)


@functools.lru_cache(maxsize=256)
def _index_outputs(rows: KernelTaps, columns: KernelTaps, device: torch.device) -> list[PixelIndex]:
    """For each tap, the output that meets every pixel there: `[H, W]` positions in `[H', W', h, w]`."""
    indices = []
    for tap, (row, column) in enumerate(itertools.product(range(rows.used), range(columns.used))):
        down, across = rows.list_outputs()[:, None, row], columns.list_outputs()[None, :, column]
        inside = _is_within(down, rows.out) & _is_within(across, columns.out)
        positions = (down * columns.out + across) * rows.used * columns.used + tap
        indices.append(PixelIndex.from_arrays(positions, inside, device))
    return indices


def _is_within(positions: np.ndarray, count: int) -> np.ndarray:
    return (positions >= 0) & (positions < count)


class ImageColumns(torch.autograd.Function):
    """The pixels that each output meets, `[N, H', W', h, w, C]`, from images `[N, H, W, C]`: a gather both ways."""

    @staticmethod
    def forward(images: Tensor, rows: KernelTaps, columns: KernelTaps) -> Tensor:
        """Zero outside the image."""
        pixels = _index_pixels(rows, columns, images.device).take_pixels(images.flatten(1, 2))
        return pixels.view(len(images), rows.out, columns.out, rows.used, columns.used, images.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """The derivative needs only shapes."""
        _, ctx.rows, ctx.columns = inputs

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        """Each pixel sums over the outputs and taps that met it."""
        rows, columns, slope = ctx.rows, ctx.columns, slopes[0]
        flat, dtype = slope.flatten(1, 4), torch.promote_types(slope.dtype, torch.float32)
        # One term after another: as a reduction over so few taps, the compiled kernel takes four times as long.
        terms = (index.take_pixels(flat).to(dtype) for index in _index_outputs(rows, columns, slope.device))
        total = functools.reduce(torch.add, terms).to(slope.dtype)
        return total.view(len(slope), rows.side, columns.side, slope.shape[-1]), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], images: Tensor, rows: KernelTaps, columns: KernelTaps
    ) -> tuple[Tensor, int]:
        """There are no weights, so all clients' images are one batch."""
        stack = images.movedim(in_dims[0], 0)
        pixels: Tensor = ImageColumns.apply(stack.flatten(0, 1), rows, columns)  # type: ignore[no-untyped-call]
        return pixels.view(*stack.shape[:2], *pixels.shape[1:]), 0


class TransposedProduct(torch.autograd.Function):
    """`left @ right.T` with a derivative in the memory layout of `right`, which updates of weights read in order.

    Autograd would give the transpose of `left.T @ slopes`, with which a compiled update takes ten times as long.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        """`[P, K]` by `[O, K]`."""
        return left @ right.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """The derivative needs both factors."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor, Tensor]:
        """One product for each factor."""
        left, right = ctx.saved_tensors
        return slopes[0] @ right, slopes[0].T @ left


class StackedConv2d(nn.Conv2d):
    """A convolution for vmap: one batched matrix product if its image columns are small, else a stream per client."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, O, H', W']`; the weights may be only those inside the kernel's window."""
        dtype, taps = self._compute_dtype(inputs), self.find_used_taps(inputs)
        images, weights = (tensor.to(dtype).permute(0, 2, 3, 1) for tensor in (inputs, self.weight))
        if taps:
            outputs = _convolve_by_product(images, weights, *taps)
        else:
            options = (*map(list, (self.stride, self.padding, self.dilation)), self.groups)
            outputs = MappedConvolution.apply(images, weights, *options)  # type: ignore[no-untyped-call]
        outputs = outputs.permute(0, 3, 1, 2)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)[:, None, None]

    def find_used_taps(self, inputs: Tensor) -> tuple[KernelTaps, KernelTaps] | None:
        """The used part of the kernel, rows and columns, if these images are convolved by a matrix product."""
        count, channels, *sides = inputs.shape
        shape = (self.kernel_size, self.stride, self.padding, self.dilation)
        rows, columns = (KernelTaps.find_used(*side) for side in zip(sides, *shape, strict=True))  # type: ignore[arg-type]
        element_size = self._compute_dtype(inputs).itemsize
        column_bytes = count * rows.out * columns.out * rows.used * columns.used * channels * element_size
        is_cropped = self.weight.shape[2:] != self.kernel_size
        fits = self.groups == 1 and column_bytes <= MAX_COLUMN_BYTES
        return (rows, columns) if is_cropped or fits else None

    def _compute_dtype(self, inputs: Tensor) -> torch.dtype:
        mixed = torch.is_autocast_enabled(inputs.device.type)
        return torch.get_autocast_dtype(inputs.device.type) if mixed else self.weight.dtype


def _convolve_by_product(images: Tensor, weights: Tensor, rows: KernelTaps, columns: KernelTaps) -> Tensor:
    """`[B H' W', h w C]` by `[h w C, O]`, with only the taps that ever meet a pixel."""
    used = weights
    if weights.shape[1:3] != (rows.used, columns.used):
        used = weights[:, rows.first : rows.first + rows.used, columns.first : columns.first + columns.used]
    pixels: Tensor = ImageColumns.apply(images, rows, columns)  # type: ignore[no-untyped-call]
    left, right = pixels.flatten(3).flatten(0, 2), used.flatten(1)
    # Matrix units need rows of a multiple of 16 bytes, which three color channels do not give.
    if missing := -left.shape[1] % COLUMN_MULTIPLE:
        left, right = (nn.functional.pad(factor, (0, missing)) for factor in (left, right))
    product: Tensor = TransposedProduct.apply(left, right)  # type: ignore[no-untyped-call]
    return product.view(len(images), rows.out, columns.out, len(used))


class ChannelsLastGroupNorm(nn.GroupNorm):
    """The same numbers as GroupNorm, for images with channels last in memory, and in the images' dtype."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, C, H, W]` to the same shape."""
        rows, channels, height, width = inputs.shape
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        # Sums over pixels come first, which reads memory in order; sums over a group's few channels would not.
        sums = (part.sum((2, 3)).view(rows, self.num_groups, -1).sum(-1) for part in (wide, wide.square()))
        mean, square = (part / (height * width * channels // self.num_groups) for part in sums)
        # Rounding may make the variance of a constant image slightly negative.
        scale = torch.rsqrt((square - mean.square()).clamp(min=0) + self.eps)
        scale, shift = (part.repeat_interleave(channels // self.num_groups, 1) for part in (scale, mean))
        if self.affine:
            scale, shift = scale * self.weight, shift * scale * self.weight - self.bias
        else:
            shift = shift * scale
        return (wide * scale[:, :, None, None] - shift[:, :, None, None]).to(inputs.dtype)


class ChannelsLastBatchNorm2d(nn.BatchNorm2d):
    """The same numbers as BatchNorm2d in training mode, in the images' dtype, from operations that vmap can map."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, C, H, W]` to the same shape; the running statistics are updated."""
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        rows, momentum = inputs.numel() // inputs.shape[1], self.momentum
        if rows == 1:
            raise ValueError("BatchNorm has 1 value per channel to train on; it needs at least 2: use larger batches")
        assert momentum is not None
        for running, current in ((self.running_mean, mean), (self.running_var, variance * (rows / (rows - 1)))):
            assert running is not None
            running.copy_((1 - momentum) * running + momentum * current.detach())
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        normal = (wide - mean[:, None, None]) * torch.rsqrt(variance + self.eps)[:, None, None]
        if self.affine:
            normal = normal * self.weight[:, None, None] + self.bias[:, None, None]
        return normal.to(inputs.dtype)


def make_stackable(module: nn.Module) -> nn.Module:
    """A copy whose convolutions and norms run well under vmap; the parameters keep their names."""
    stackable = copy.deepcopy(module)
    for layer in stackable.modules():
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = StackedConv2d
        elif type(layer) is nn.GroupNorm:
            layer.__class__ = ChannelsLastGroupNorm
        elif type(layer) is nn.BatchNorm2d and layer.track_running_stats and layer.momentum is not None:
            layer.__class__ = ChannelsLastBatchNorm2d
    return stackable
