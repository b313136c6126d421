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
        # Kinds of outputs that there are none of have no buffers, because torch.export cannot save empty tensors.
        arrays = {name: array for name, array in layout._asdict().items() if len(array)}
        if len(layout.wave_period):
            # A buffer keeps float64 in an exported model, where a constant may become float32.
            arrays["wave_rate"] = 2 * np.pi / layout.wave_period
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)))
        self.kinds = frozenset(arrays)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """The encoded rows."""
        parts: list[Tensor] = []
        if "fill" in self.kinds:
            numbers = numbers.double()
            missing = torch.isnan(numbers)
            scaled = (torch.where(missing, self.fill, numbers) - self.shift) / self.scale
            parts.append(scaled)
            if "indicator_column" in self.kinds:
                parts.append(missing[:, self.indicator_column].double())
            if "bin_column" in self.kinds:
                parts.append(((scaled[:, self.bin_column] - self.bin_left) / self.bin_width).clamp(0, 1))
            if "wave_column" in self.kinds:
                known = torch.where(missing, 0.0, numbers)[:, self.wave_column]
                present = (~missing[:, self.wave_column]).double()
                angles = self.wave_rate * known
                parts += [torch.sin(angles) * present, torch.cos(angles) * present]
        if "category_column" in self.kinds:
            parts.append((codes[:, self.category_column] == self.category_code).double())
        return torch.cat(parts, dim=1)[:, self.order].float()
