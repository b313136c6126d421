"""The encoding of features as a network, so that an exported model takes raw columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedauc.data.features import FeatureLayout


class FeatureModule(nn.Module):
    """`forward(numbers, codes)`: float64 `[n, a]` and int64 `[n, b]` to float32 `[n, width]`, as the encoder does."""

    fill: Tensor
    shift: Tensor
    scale: Tensor
    indicator_column: Tensor
    bin_column: Tensor
    bin_left: Tensor
    bin_width: Tensor
    wave_column: Tensor
    wave_period: Tensor
    wave_rate: Tensor
    category_column: Tensor
    category_code: Tensor
    order: Tensor

    def __init__(self, layout: FeatureLayout) -> None:
        super().__init__()
        for name, array in layout._asdict().items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)))
        # A buffer keeps float64 in an exported model, where a constant may become float32.
        self.register_buffer("wave_rate", 2 * torch.pi / self.wave_period)
        self.only_numbers = layout.only_numbers

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """The encoded rows."""
        numbers = numbers.double()
        missing = torch.isnan(numbers)
        scaled = (torch.where(missing, self.fill, numbers) - self.shift) / self.scale
        if self.only_numbers:
            return scaled.float()
        bins = ((scaled[:, self.bin_column] - self.bin_left) / self.bin_width).clamp(0, 1)
        known = torch.where(missing, 0.0, numbers)[:, self.wave_column]
        present = (~missing[:, self.wave_column]).double()
        angles = self.wave_rate * known
        waves = [torch.sin(angles) * present, torch.cos(angles) * present]
        categories = codes[:, self.category_column] == self.category_code
        indicators = missing[:, self.indicator_column]
        parts = [scaled, indicators.double(), bins, *waves, categories.double()]
        return torch.cat(parts, dim=1)[:, self.order].float()
