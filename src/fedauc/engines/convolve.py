"""Layers for a stack of clients on a GPU: as few and as large operations as can be.

Convolutions with different weights have no good batched kernel (grouped ones leave the matrix units idle). Small ones
are one batched matrix product of all clients; large ones run side by side, each client's on a stream of its own. All
else is elementwise or a reduction, which the compiler makes one kernel for all clients. Images have their channels last
here: `[M, B, H, W, C]`, weights `[M, O, h, w, C]`.
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

Found = TypeVar("Found")

COLUMNS = 24 << 20
"""Bytes of one client's columns up to which a convolution is a matrix product; beyond, cuDNN side by side is faster."""

EVEN = 8
"""Columns of a matrix product come in multiples of so many."""

STREAMS = 32
"""Convolutions that may run at the same time."""


@torch.library.custom_op("fedauc::convolve", mutates_args=())
def convolve(
    images: Tensor, weights: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """Each client's images by its own weights: `[M, B, H', W', O]`."""

    def one(place: int) -> Tensor:
        shape = (stride, padding, dilation, groups)
        return nn.functional.conv2d(_first(images[place]), _first(weights[place]), None, *shape).permute(0, 2, 3, 1)

    return torch.stack(_side_by_side(one, len(images), images.device))


@convolve.register_fake
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
def convolve_back(
    slopes: Tensor,
    images: Tensor,
    weights: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """The derivatives with respect to the images (nothing, for a first layer) and to the weights."""

    def one(place: int) -> tuple[Tensor, Tensor]:
        shape = (None, stride, padding, dilation, False, [0, 0], groups, [not first, True, False])
        parts = (_first(part[place]) for part in (slopes, images, weights))
        left, right, _ = torch.ops.aten.convolution_backward(*parts, *shape)
        return right if first else left.permute(0, 2, 3, 1), right.permute(0, 2, 3, 1)

    found = _side_by_side(one, len(images), images.device)
    left = images.new_empty(0) if first else torch.stack([pair[0] for pair in found])
    return left, torch.stack([pair[1] for pair in found])


@convolve_back.register_fake
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
    left = images.new_empty(0) if first else images.new_empty(images.shape)
    return left, weights.new_empty(weights.shape)


class Convolve(torch.autograd.Function):
    """`convolve` with its derivative, for torch.func and for autograd."""

    @staticmethod
    def forward(images: Tensor, weights: Tensor, *shape: Any) -> Tensor:
        """Every client's convolution."""
        outputs: Tensor = convolve(images, weights, *shape)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the derivative needs."""
        images, weights, *ctx.shape = inputs
        ctx.save_for_backward(images, weights)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        """Every client's derivatives."""
        images, weights = ctx.saved_tensors
        first = not ctx.needs_input_grad[0]
        left, right = convolve_back(slopes[0].contiguous(), images, weights, *ctx.shape, first)
        return None if first else left, right, None, None, None, None


def _first(images: Tensor) -> Tensor:
    """Channels first in shape, last in memory."""
    return images.permute(0, 3, 1, 2)


def _side_by_side(one: Callable[[int], Found], count: int, device: torch.device) -> list[Found]:
    """Each client's result; on a GPU on streams of their own, which start after and end before what is around."""
    if device.type != "cuda":
        return [one(place) for place in range(count)]
    main = torch.cuda.current_stream(device)
    streams = _streams(device, main.cuda_stream)[:count]
    for stream in streams:
        stream.wait_stream(main)
    found = []
    for place in range(count):
        with torch.cuda.stream(streams[place % len(streams)]):
            found.append(one(place))
    for stream in streams:
        main.wait_stream(stream)
    return found


@functools.lru_cache(maxsize=64)
def _streams(device: torch.device, beside: int) -> list[torch.cuda.Stream]:
    """Streams that no other stream's convolutions use, or those would wait for each other."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


class ConvolveOne(torch.autograd.Function):
    """One client's convolution, which vmap turns into everybody's."""

    @staticmethod
    def forward(images: Tensor, weights: Tensor, *shape: Any) -> Tensor:
        """A stack of one."""
        outputs: Tensor = convolve(images[None], weights[None], *shape)[0]
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Its derivative is `Convolve`'s."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """A stack of all."""
        stacks = [
            part.expand(info.batch_size, *part.shape) if place is None else part.movedim(place, 0)
            for part, place in zip(inputs[:2], in_dims[:2], strict=True)
        ]
        outputs: Tensor = Convolve.apply(*(stack.contiguous() for stack in stacks), *inputs[2:])  # type: ignore[no-untyped-call]
        return outputs, 0


class Taps(NamedTuple):
    """One side of a convolution: its input and output length, and the kernel's places that ever meet a pixel."""

    side: int
    out: int
    first: int
    used: int
    stride: int
    padding: int
    dilation: int

    @staticmethod
    def of(side: int, size: int, stride: int, padding: int, dilation: int) -> Taps:
        """On small images the kernel's rim meets padding only, and is left out."""
        out = (side + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        starts = [place * stride - padding for place in range(out)]
        met = [tap for tap in range(size) if any(0 <= start + tap * dilation < side for start in starts)] or [0]
        return Taps(side, out, met[0], met[-1] - met[0] + 1, stride, padding, dilation)

    def pixels(self) -> np.ndarray:
        """The pixel that output `o` meets at tap `t`, `[out, used]`; outside the image where there is none."""
        taps = np.arange(self.used) + self.first
        return np.arange(self.out)[:, None] * self.stride - self.padding + taps * self.dilation

    def outputs(self) -> np.ndarray:
        """The output that meets pixel `h` at tap `t`, `[side, used]`; outside the range where there is none."""
        taps = np.arange(self.used) + self.first
        shifted = np.arange(self.side)[:, None] + self.padding - taps * self.dilation
        return np.where(shifted % self.stride == 0, shifted // self.stride, -1)


class Places(NamedTuple):
    """Places in a flattened image, and which of them lie inside it."""

    flat: Tensor
    inside: Tensor

    def take(self, pixels: Tensor) -> Tensor:
        """Pixels `[N, places, C]` out of `[N, pixels, C]`, black outside."""
        found = pixels.index_select(1, self.flat)
        return torch.where(self.inside[:, None], found, torch.zeros((), dtype=found.dtype, device=found.device))


@functools.lru_cache(maxsize=256)
def _sources(rows: Taps, columns: Taps, device: torch.device) -> Places:
    """The pixel that every output meets at every tap: [H', W', h, w] places."""
    down, across = rows.pixels()[:, None, :, None], columns.pixels()[None, :, None, :]
    inside = _within(down, rows.side) & _within(across, columns.side)
    return _places(np.where(inside, down * columns.side + across, 0), inside, device)


@functools.lru_cache(maxsize=256)
def _targets(rows: Taps, columns: Taps, device: torch.device) -> tuple[Places, ...]:
    """For each tap, the output that meets every pixel there: [H, W] places in [H', W', h, w]."""
    found = []
    for tap, (row, column) in enumerate(itertools.product(range(rows.used), range(columns.used))):
        down, across = rows.outputs()[:, None, row], columns.outputs()[None, :, column]
        inside = _within(down, rows.out) & _within(across, columns.out)
        places = (down * columns.out + across) * rows.used * columns.used + tap
        found.append(_places(np.where(inside, places, 0), inside, device))
    return tuple(found)


def _within(places: np.ndarray, count: int) -> np.ndarray:
    return (places >= 0) & (places < count)


def _places(flat: np.ndarray, inside: np.ndarray, device: torch.device) -> Places:
    return Places(*(torch.from_numpy(part.reshape(-1)).to(device) for part in (flat, inside)))


class Columns(torch.autograd.Function):
    """What each output pixel meets, `[N, H', W', h, w, C]`, from images `[N, H, W, C]`: a gather both ways."""

    @staticmethod
    def forward(images: Tensor, rows: Taps, columns: Taps) -> Tensor:
        """Black outside the image."""
        found = _sources(rows, columns, images.device).take(images.flatten(1, 2))
        return found.view(len(images), rows.out, columns.out, rows.used, columns.used, images.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Only shapes are needed."""
        _, ctx.rows, ctx.columns = inputs

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        """Each pixel sums over the outputs and taps that met it."""
        rows, columns, slope = ctx.rows, ctx.columns, slopes[0]
        met, wide = slope.flatten(1, 4), torch.promote_types(slope.dtype, torch.float32)
        # One term after another: as a reduction over so few taps, the compiled kernel takes four times as long.
        terms = (places.take(met).to(wide) for places in _targets(rows, columns, slope.device))
        total = functools.reduce(torch.add, terms).to(slope.dtype)
        return total.view(len(slope), rows.side, columns.side, slope.shape[-1]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], images: Tensor, rows: Taps, columns: Taps) -> tuple[Tensor, int]:
        """No weights here: all clients' images are one batch."""
        stack = images.movedim(in_dims[0], 0)
        found: Tensor = Columns.apply(stack.flatten(0, 1), rows, columns)  # type: ignore[no-untyped-call]
        return found.view(*stack.shape[:2], *found.shape[1:]), 0


class Product(torch.autograd.Function):
    """`left @ right.T`, whose derivative comes in the layout of `right`: updates of weights read it in order.

    Left to autograd it would be the transpose of `left.T @ slopes`, and a compiled update takes ten times as long.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        """[P, K] by [O, K]."""
        return left @ right.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Both are needed."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor, Tensor]:
        """Two products."""
        left, right = ctx.saved_tensors
        return slopes[0] @ right, slopes[0].T @ left


class StackedConv2d(nn.Conv2d):
    """A convolution for vmap: as one batched matrix product where its columns are small, else a stream per client."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, O, H', W']`; the weights may be those inside the kernel's window alone."""
        dtype, taps = self._dtype(inputs), self.taps(inputs)
        images, weights = (part.to(dtype).permute(0, 2, 3, 1) for part in (inputs, self.weight))
        if taps:
            outputs = self._product(images, weights, *taps)
        else:
            shape = map(list, (self.stride, self.padding, self.dilation))
            outputs = ConvolveOne.apply(images, weights, *shape, self.groups)  # type: ignore[no-untyped-call]
        outputs = outputs.permute(0, 3, 1, 2)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)[:, None, None]

    def taps(self, inputs: Tensor) -> tuple[Taps, Taps] | None:
        """What is used of the kernel, down and across, if these images are convolved by a product."""
        count, channels, *sides = inputs.shape
        shape = (self.kernel_size, self.stride, self.padding, self.dilation)
        rows, columns = (Taps.of(*side) for side in zip(sides, *shape, strict=True))  # type: ignore[arg-type]
        bytes_ = count * rows.out * columns.out * rows.used * columns.used * channels * self._dtype(inputs).itemsize
        inside = self.weight.shape[2:] != self.kernel_size
        return (rows, columns) if inside or (self.groups == 1 and bytes_ <= COLUMNS) else None

    def _dtype(self, inputs: Tensor) -> torch.dtype:
        mixed = torch.is_autocast_enabled(inputs.device.type)
        return torch.get_autocast_dtype(inputs.device.type) if mixed else self.weight.dtype

    @staticmethod
    def _product(images: Tensor, weights: Tensor, rows: Taps, columns: Taps) -> Tensor:
        """[B H' W', h w C] by [h w C, O], with only the taps that ever meet a pixel."""
        used = weights
        if weights.shape[1:3] != (rows.used, columns.used):
            used = weights[:, rows.first : rows.first + rows.used, columns.first : columns.first + columns.used]
        met: Tensor = Columns.apply(images, rows, columns)  # type: ignore[no-untyped-call]
        left, right = met.flatten(3).flatten(0, 2), used.flatten(1)
        # Matrix units take rows of 16 bytes: colour images would miss that.
        if spare := -left.shape[1] % EVEN:
            left, right = (nn.functional.pad(part, (0, spare)) for part in (left, right))
        product: Tensor = Product.apply(left, right)  # type: ignore[no-untyped-call]
        return product.view(len(images), rows.out, columns.out, len(used))


class LastGroupNorm(nn.GroupNorm):
    """The same numbers as GroupNorm, from images whose channels stay last in memory, and in the images' type."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, C, H, W]` to the same."""
        rows, channels, height, width = inputs.shape
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        # Sums over pixels first: memory is then read in order, which sums over a group's few channels would not.
        sums = (part.sum((2, 3)).view(rows, self.num_groups, -1).sum(-1) for part in (wide, wide.square()))
        mean, square = (part / (height * width * channels // self.num_groups) for part in sums)
        # Rounding may leave a little less than nothing of an image without contrast.
        scale = torch.rsqrt((square - mean.square()).clamp(min=0) + self.eps)
        scale, shift = (part.repeat_interleave(channels // self.num_groups, 1) for part in (scale, mean))
        if self.affine:
            scale, shift = scale * self.weight, shift * scale * self.weight - self.bias
        else:
            shift = shift * scale
        return (wide * scale[:, :, None, None] - shift[:, :, None, None]).to(inputs.dtype)


class LastBatchNorm2d(nn.BatchNorm2d):
    """The same numbers as BatchNorm2d in training mode, in the images' type, from operations that vmap and mix well."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, C, H, W]` to the same; the running statistics move on."""
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        spread, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        rows, share = inputs.numel() // inputs.shape[1], self.momentum
        if rows == 1:
            raise ValueError("BatchNorm has 1 value per channel to train on; it needs at least 2: use larger batches")
        assert share is not None
        for kept, now in ((self.running_mean, mean), (self.running_var, spread * (rows / (rows - 1)))):
            assert kept is not None
            kept.copy_((1 - share) * kept + share * now.detach())
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        normal = (wide - mean[:, None, None]) * torch.rsqrt(spread + self.eps)[:, None, None]
        if self.affine:
            normal = normal * self.weight[:, None, None] + self.bias[:, None, None]
        return normal.to(inputs.dtype)


def stackable(module: nn.Module) -> nn.Module:
    """A copy whose convolutions and norms suit a stack of clients; the parameters keep their names."""
    made = copy.deepcopy(module)
    for layer in made.modules():
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.__class__ = StackedConv2d
        elif type(layer) is nn.GroupNorm:
            layer.__class__ = LastGroupNorm
        elif type(layer) is nn.BatchNorm2d and layer.track_running_stats and layer.momentum is not None:
            layer.__class__ = LastBatchNorm2d
    return made
