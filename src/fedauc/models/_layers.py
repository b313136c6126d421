"""The layers that the models are made of. They need torch, so a model imports them when it is built."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NormFactory = Callable[[int], nn.Module]
"""Makes the norm of a layer from its number of channels."""


class InputScaling(nn.Module):
    """Runs a network on floats: uint8 images become (x / 255 - shift) / scale in the type of its weights.

    The defaults give values in [0, 1]; a shift of 1/2 and a scale of 1/4 give a photograph a mean of about 0 and a
    standard deviation of about 1. Floats are passed on unchanged.
    """

    def __init__(self, body: nn.Module, shift: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.body = body
        self.shift, self.scale = shift, scale

    @property
    def divides_only(self) -> bool:
        """Whether images become values in [0, 1] without further scaling."""
        return (self.shift, self.scale) == (0.0, 1.0)

    def extra_repr(self) -> str:
        """The constants, so that two networks with the same text compute the same."""
        return f"shift={self.shift}, scale={self.scale}"

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the network."""
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(next(self.body.parameters()).dtype) / 255
            inputs = inputs if self.divides_only else (inputs - self.shift) / self.scale
        outputs: Tensor = self.body(inputs)
        return outputs


class ImageMean(nn.Module):
    """The mean of each channel over the image."""

    def forward(self, images: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C]`."""
        return images.mean((-2, -1))


class Head(nn.Linear):
    """The last layer, in the type of its weights even in mixed precision: bfloat16 would give many rows one score."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, in]` to `[B, out]`."""
        with torch.autocast(inputs.device.type, enabled=False):
            return super().forward(inputs.to(self.weight.dtype))


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + body(x)), where the shortcut is the identity unless the shape changes."""

    def __init__(self, channels: int, out: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        first = (unbiased_convolution(channels, out, 3, stride), norm(out), nn.ReLU())
        self.body = nn.Sequential(*first, unbiased_convolution(out, out, 3), norm(out))
        if stride == 1 and channels == out:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = nn.Sequential(unbiased_convolution(channels, out, 1, stride), norm(out))
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C', H', W']`."""
        outputs: Tensor = self.activation(self.body(images) + self.shortcut(images))
        return outputs


class DenseLayer(nn.Module):
    """Appends `growth` new channels, computed from all earlier ones."""

    def __init__(self, channels: int, growth: int, norm: NormFactory) -> None:
        super().__init__()
        narrow = 4 * growth
        first = (norm(channels), nn.ReLU(), unbiased_convolution(channels, narrow, 1))
        self.body = nn.Sequential(*first, norm(narrow), nn.ReLU(), unbiased_convolution(narrow, growth, 3))

    def forward(self, images: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C + growth, H, W]`."""
        return torch.cat([images, self.body(images)], dim=-3)


def norm_factory(norm: str, norm_groups: int) -> NormFactory:
    """Makes BatchNorm for "batch", and GroupNorm with `norm_groups` groups for "group"."""
    return nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(norm_groups, channels)


def unbiased_convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, since a norm follows, and padded so that stride 1 keeps the size of the image."""
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)


def stem_layers(stem: str, channels: int, out: int, norm: NormFactory) -> nn.Sequential:
    """A convolution, a norm and a rectifier, and in the ImageNet stem a max-pool."""
    if stem == "cifar":
        return nn.Sequential(unbiased_convolution(channels, out, 3), norm(out), nn.ReLU())
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(unbiased_convolution(channels, out, 7, stride=2), norm(out), nn.ReLU(), pool)


class AttentionBlock(nn.Module):
    """Self-attention and a layer of two linear maps, each after a norm and added to its input.

    Attention is written as matrix products, which torch can map over clients.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mixing_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixing = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        """`[B, T, width]` to the same shape."""
        projected = self.projections(self.attention_norm(states)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = projected.movedim(-2, -4).unbind(-2)
        scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
        attended = (scores.softmax(-1) @ values).movedim(-3, -2).flatten(-2)
        states = states + self.output(attended)
        mixed: Tensor = states + self.mixing(self.mixing_norm(states))
        return mixed


class TokenTransformer(nn.Module):
    """Embeddings of tokens and of their positions, blocks of attention, the mean over the positions, and a head."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), Head(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `[B, T]` to scores `[B, 1]`."""
        states = self.tokens(tokens) + self.positions.weight
        scores: Tensor = self.head(self.norm(self.blocks(states)).mean(-2))
        return scores


class AddedBranches(nn.Module):
    """The sum of several networks on the same inputs; with `nn.Identity` as one of them it is a skip connection."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, n]` to the shape that all branches return."""
        first, *others = self.branches
        outputs: Tensor = first(inputs)
        for branch in others:
            outputs = outputs + branch(inputs)
        return outputs
