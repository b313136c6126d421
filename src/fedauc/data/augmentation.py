"""Random crops and flips of images: drawn with a key as plain numbers, and applied on the images' device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedauc import keys

if TYPE_CHECKING:
    from torch import Tensor

MARGIN = 4
"""Pixels of black around an image before it is cropped back to its size (He et al. 2016, section 4.2)."""

AUGMENTS: Mapping[str, str] = {
    "none": "images as they are",
    "crop-flip": f"a crop shifted by up to {MARGIN} pixels each way, mirrored half of the time",
}


def draw_crops(count: int, seed: int, round: int, client: int) -> np.ndarray:
    """The crops `[count, 3]` of a client's visit: offsets down and right from 0 to 2 MARGIN, and whether to mirror."""
    words = keys.random_words(count, seed, "augment", round, client)
    # Disjoint bits of one word; 16 bits over 9 values are biased by 1e-4 at most.
    parts = np.stack([words, words >> np.uint64(16), words >> np.uint64(32)], axis=-1) & np.uint64(0xFFFF)
    return (parts % np.array([2 * MARGIN + 1, 2 * MARGIN + 1, 2], dtype=np.uint64)).astype(np.uint8)


def apply_crops(images: Tensor, crops: Tensor) -> Tensor:
    """Images `[..., C, H, W]` cropped and mirrored by crops `[..., 3]`; pixels outside an image are black (zero)."""
    height, width = images.shape[-2:]
    down, right, mirror = crops.long().unbind(-1)
    rows = torch.arange(height, device=images.device) + (down[..., None] - MARGIN)
    columns = torch.arange(width, device=images.device).expand(*mirror.shape, width)
    columns = torch.where(mirror[..., None] > 0, width - 1 - columns, columns) + (right[..., None] - MARGIN)
    inside = _is_inside(rows, height)[..., :, None] & _is_inside(columns, width)[..., None, :]
    pixels = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
    index = pixels.flatten(-2)[..., None, :].expand(*images.shape[:-2], height * width)
    cropped = images.flatten(-2).gather(-1, index).view(images.shape)
    return cropped * inside[..., None, :, :].to(images.dtype)


def _is_inside(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)
