"""Networks for a stacked cohort: M clients' own weights `[M, d]` on their own rows `[M, B, ...]` at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedauc.engines.kernels import Unsupported, kernels
from fedauc.interfaces import ForwardPass, Model, Network
from fedauc.network import ModuleNetwork


class KernelNetwork(Network):
    """A chain of layers with hand-written batched kernels: no autograd, one call per layer and direction."""

    def __init__(self, module: nn.Module) -> None:
        self._kernels = kernels(module)
        self.lengths = [length for kernel in self._kernels for length in kernel.lengths]
        self._first = next(place for place, kernel in enumerate(self._kernels) if kernel.lengths)

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """Layer by layer forward; the pullback goes back through what each layer saved."""
        left = iter(torch.split(model.weights, self.lengths, dim=1))
        parts = [[next(left) for _ in kernel.lengths] for kernel in self._kernels]
        saved = []
        outputs = inputs
        for kernel, weights in zip(self._kernels, parts, strict=True):
            outputs, kept = kernel.forward(weights, outputs)
            saved.append(kept)
        single = outputs.shape[-1] == 1

        def pullback(cotangent: Tensor) -> Tensor:
            slope = cotangent[..., None] if single else cotangent
            gradients: list[Tensor] = []
            for place in range(len(self._kernels) - 1, self._first - 1, -1):
                kernel = self._kernels[place]
                slope, found = kernel.backward(parts[place], saved[place], slope, place == self._first)
                gradients = found + gradients
            return torch.cat(gradients, dim=1)

        return ForwardPass(outputs[..., 0] if single else outputs, model.buffers, pullback)


class VmapNetwork(Network):
    """Any module without buffers, through torch.func.vmap: one mapped forward pass and one backward pass."""

    def __init__(self, network: ModuleNetwork) -> None:
        if network.state().buffers.numel():
            raise Unsupported("its buffers cannot be mapped over clients")
        self._network = network
        self._mapped = vmap(network.call, randomness="error")

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """The gradient of all clients' outputs at once is each client's own, since no client's depend on another's."""
        weights = model.weights.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self._mapped(weights, inputs)

        def pullback(cotangent: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(outputs, weights, cotangent)
            return gradient

        return ForwardPass(outputs.detach(), model.buffers, pullback)
