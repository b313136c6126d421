"""Block quantization to 8 or 4 bits: a model's change travels as small integers and one scale per block.

    scale_b = max |x_b| / q  with q = 127 or 7;  code = ⌊x / scale_b + u⌋,  u uniform in [0, 1)  (stochastic rounding)
    what the server reads: code · scale_b, whose expectation is x

With error feedback a client adds what rounding has lost to its next upload, so that nothing is lost for good: x is the
change plus the error e, and e ← x - code · scale. Alistarh et al., QSGD: communication-efficient SGD via gradient
quantization and encoding, NeurIPS 2017; Karimireddy et al., Error feedback fixes SignSGD and other gradient compression
schemes, ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.fields import option
from fedauc.random_tensors import random_uniform
from fedauc.transforms._encoding import EncodingTransform

if TYPE_CHECKING:
    from torch import Tensor


class Quantized(NamedTuple):
    """Codes, int8 `[..., n]` or two to a byte in uint8 `[..., ⌈n/2⌉]`, and float32 scales `[..., blocks]`."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, kw_only=True)
class Quantize(EncodingTransform):
    """Sends the change as 8-bit or 4-bit codes; single numbers (dual variables) stay as they are."""

    name: ClassVar[str] = "quantize"
    bits: int = option(8, "Bits of a number: 8 or 4.", at_least=4, at_most=8)
    block: int = option(256, "Numbers that share a scale.", at_least=2)
    rounding: Literal["stochastic", "nearest"] = option("stochastic", "Unbiased random rounding, or to the nearest.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}; it must be 8 or 4: use one of these")

    @property
    def largest_code(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def encode_vector(self, vector: Tensor, key: Tensor) -> Quantized:
        """Codes and scales of vectors `[..., n]`."""
        count = vector.shape[-1]
        padded = torch.nn.functional.pad(vector.float(), (0, -count % self.block))
        blocks = padded.reshape(*padded.shape[:-1], -1, self.block)
        scales = blocks.abs().amax(-1) / self.largest_code
        # A block of zeros has scale 0, and every code 0.
        steps = (blocks / torch.where(scales > 0, scales, 1.0)[..., None]).reshape(padded.shape)[..., :count]
        shift = random_uniform(key, count) if self.rounding == "stochastic" else 0.5
        codes = torch.floor(steps + shift).clamp(-self.largest_code, self.largest_code)
        return Quantized(_pack_nibbles(codes) if self.bits == 4 else codes.to(torch.int8), scales)

    def decode_vector(self, encoded: Quantized, count: int) -> Tensor:
        """The vectors `[..., count]` that codes and scales stand for."""
        codes = _unpack_nibbles(encoded.codes, count) if self.bits == 4 else encoded.codes.float()
        scales = encoded.scales.repeat_interleave(self.block, dim=-1)[..., :count]
        return codes * scales


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Codes from -7 to 7, two to a byte, the first in the low bits."""
    shifted = torch.nn.functional.pad((codes + 8).to(torch.uint8), (0, codes.shape[-1] % 2))
    return shifted[..., 0::2] | (shifted[..., 1::2] << 4)


def _unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], dim=-1)
    return both.reshape(*packed.shape[:-1], -1)[..., :count].float() - 8
