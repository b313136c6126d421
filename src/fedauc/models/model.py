"""What a model configuration is: frozen parameters that build a network, keyed by a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedauc import keys


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A model before it is built. A member gives `layers`; everything random happens inside `build`."""

    name: ClassVar[str]
    shift: ClassVar[float] = 0.0
    scale: ClassVar[float] = 1.0
    """uint8 images become (x / 255 - shift) / scale."""

    @abstractmethod
    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The network for inputs `[B, *input_shape]` of floats; outputs `[B, 1]`, or `[B, E]` for embeddings."""

    def build(self, input_shape: tuple[int, ...], seed: int) -> nn.Module:
        """The network on the CPU, the same for the same seed; global generators stay as they were."""
        if not input_shape or min(input_shape) < 1:
            raise ValueError(f"input_shape is {input_shape}; it must name at least one feature, without the batch size")
        with _seeded_generator(keys.random_integer(seed, "model", self.name)), torch.device("cpu"):
            return InputScaling(self.build_layers(tuple(input_shape)), self.shift, self.scale)


class InputScaling(nn.Module):
    """Runs a network on floats: uint8 images become (x / 255 - shift) / scale in the type of its weights.

    The defaults give [0, 1]; a half and a quarter make a photograph's mean about 0 and its deviation about 1. Floats
    pass as they are.
    """

    def __init__(self, body: nn.Module, shift: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.body = body
        self.shift, self.scale = shift, scale

    @property
    def divides_only(self) -> bool:
        """Whether images become [0, 1] and nothing more."""
        return (self.shift, self.scale) == (0.0, 1.0)

    def extra_repr(self) -> str:
        """Its constants, so that two networks that print alike compute alike."""
        return f"shift={self.shift}, scale={self.scale}"

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the network."""
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(next(self.body.parameters()).dtype) / 255
            inputs = inputs if self.divides_only else (inputs - self.shift) / self.scale
        outputs: Tensor = self.body(inputs)
        return outputs


def check_counts(name: str, values: tuple[int, ...]) -> None:
    """Refuse anything but integers of at least 1."""
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")


@contextmanager
def _seeded_generator(seed: int) -> Iterator[None]:
    # torch.manual_seed would also reseed the accelerators, which fork_rng with no devices does not put back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
