"""Which convolutions of a network use a part of their kernels only: on small images the rim may never meet a pixel."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedauc.engines.convolve import StackedConv2d, Taps, stackable
from fedauc.network import ModuleNetwork
from fedauc.pieces import Cut, Window, is_large
from fedauc.trees import tree_map

FAULTS = (RuntimeError, TypeError, AssertionError, ValueError, LookupError, AttributeError)
"""What a module raises that cannot be mapped, traced, compiled or captured."""

Seen = dict[StackedConv2d, list[tuple[Taps, Taps] | None]]
"""What each call of a convolution used of its kernel."""


@torch.no_grad()
def windows(network: ModuleNetwork, rows: Tensor, batch: int) -> tuple[tuple[int, Window], ...]:
    """What is used of convolutions' kernels, where it is half of one or less, and still a piece of its own."""
    module, seen = stackable(network.plain), Seen()
    layers = {layer: name for name, layer in module.named_modules() if isinstance(layer, StackedConv2d)}
    for layer in layers:
        layer.register_forward_pre_hook(lambda each, given: _see(seen, each, given[0]))
    if not layers:
        return ()
    model, images = tree_map(lambda leaf: leaf[None], network.state()), rows[:1].expand(1, batch, *rows.shape[1:])
    try:
        # Mapped, so that a path which depends on the rows is refused.
        clean = network.trace(module, model, images, True, Cut())
    except FAULTS as error:
        # Such a module may well run in another way.
        logging.getLogger("fedauc").info("the model is taken to use whole kernels: %s", " ".join(str(error).split()))
        return ()
    found = tuple(sorted(_small(network, layers, seen)))
    if not found:
        return ()
    # Nothing but its convolution may read such a weight: what is outside the windows must not matter at all.
    vector = model.weights.clone()
    parts = torch.split(vector, list(network.cut.lengths), -1)
    for place, window in found:
        inside = window.view(parts[place]).clone()
        parts[place].fill_(torch.nan)
        window.view(parts[place]).copy_(inside)
    spoilt = network.trace(module, model._replace(weights=vector), images, True, Cut())
    same = torch.equal(spoilt.outputs, clean.outputs) and torch.equal(spoilt.buffers, clean.buffers)
    return found if same else ()


def _small(network: ModuleNetwork, layers: Mapping[StackedConv2d, str], seen: Seen) -> Iterator[tuple[int, Window]]:
    """The windows of convolutions that are called once, by the place of their weights."""
    owners = Counter(id(layer.weight) for layer in layers)
    for layer, taps in seen.items():
        name = f"{layers[layer]}.weight"
        if len(taps) == 1 and taps[0] and owners[id(layer.weight)] == 1 and name in network.names:
            window = network.window(name, *((each.first, each.used) for each in taps[0]))
            if window.share <= 0.5 and is_large(round(window.share * layer.weight.numel())):
                yield network.names.index(name), window


def _see(seen: Seen, layer: StackedConv2d, inputs: Tensor) -> None:
    seen.setdefault(layer, []).append(layer.taps(inputs))
