"""Random crops and flips of images, as data: which ones is drawn with a key, and applied on the images' device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedauc import keys

MARGIN = 4
"""Pixels of black around an image before it is cropped back to its size (He et al. 2016, section 4.2)."""

AUGMENTS: Mapping[str, str] = {
    "none": "images as they are",
    "crop-flip": f"a crop shifted by up to {MARGIN} pixels each way, mirrored half of the time",
}


def draw_moves(count: int, seed: int, round: int, client: int) -> np.ndarray:
    """`count` moves `[count, 3]` of a client's visit: down and right by 0 to 2 MARGIN, and whether to mirror."""
    words = keys.random_words(count, seed, "augment", round, client)
    # Disjoint bits of one word; 16 bits over 9 values are biased by 1e-4 at most.
    parts = np.stack([words, words >> np.uint64(16), words >> np.uint64(32)], axis=-1) & np.uint64(0xFFFF)
    return (parts % np.array([2 * MARGIN + 1, 2 * MARGIN + 1, 2], dtype=np.uint64)).astype(np.uint8)


def move(images: Tensor, moves: Tensor) -> Tensor:
    """Images `[..., C, H, W]` cropped and mirrored by moves `[..., 3]`; what comes from outside is black (zero)."""
    height, width = images.shape[-2:]
    down, right, mirror = moves.long().unbind(-1)
    rows = torch.arange(height, device=images.device) + (down[..., None] - MARGIN)
    columns = torch.arange(width, device=images.device).expand(*mirror.shape, width)
    columns = torch.where(mirror[..., None] > 0, width - 1 - columns, columns) + (right[..., None] - MARGIN)
    inside = _inside(rows, height)[..., :, None] & _inside(columns, width)[..., None, :]
    place = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
    flat = place.flatten(-2)[..., None, :].expand(*images.shape[:-2], height * width)
    moved = images.flatten(-2).gather(-1, flat).view(images.shape)
    return moved * inside[..., None, :, :].to(images.dtype)


def _inside(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)
