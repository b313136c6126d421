"""An nn.Module as a function of flat vectors: taken apart, run, and put back."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedauc.interfaces import Model, Network, Scored


class ModuleNetwork(Network):
    """Any nn.Module whose output is one score per row (`[B]` or `[B, 1]`), or an embedding (`[B, E]`).

    Parameters that do not require a gradient stay as they are and never travel. Buffers (BatchNorm statistics) travel
    and are averaged as floats; integer ones are rounded when they are put back. With `mixed`, layers run in bfloat16
    where torch.autocast lets them, while weights, gradients and scores stay as they are.

    >>> network = ModuleNetwork(nn.Linear(3, 1))
    >>> network.state().weights.shape
    torch.Size([4])
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None = None, device: str = "cpu", mixed: bool = False
    ) -> None:
        self._module = copy.deepcopy(module).to(device=device, dtype=dtype)
        self._parameters = {n: p.detach() for n, p in self._module.named_parameters() if p.requires_grad}
        self._buffers = dict(self._module.named_buffers())
        if not self._parameters:
            raise ValueError("the model has 0 trainable parameters; it needs at least 1: check requires_grad")
        wide = {p.dtype for p in self._parameters.values()}
        if len(wide) > 1:
            raise ValueError(f"the model's parameters have dtypes {sorted(map(str, wide))}; use one: model.to(dtype)")
        (self.dtype,) = wide
        self.device = torch.device(device)
        self.mixed = mixed

    @property
    def plain(self) -> nn.Module:
        """The module itself, for engines that take it apart."""
        return self._module

    def call(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in training mode as a pure function of flat weights, for modules without buffers."""
        return self._run(_cut(weights, self._parameters), inputs)

    def state(self) -> Model:
        """The module's present parameters and buffers as flat vectors."""
        return Model(self._flat(self._parameters, self.dtype), self._statistics(self._buffers))

    def module(self, model: Model) -> nn.Module:
        """A copy of the module with the given state, in evaluation mode."""
        filled = copy.deepcopy(self._module)
        own = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
        with torch.no_grad():
            for name, value in self._named(model).items():
                own[name].copy_(value)
        return filled.eval()

    def score(self, model: Model, inputs: Tensor) -> Scored:
        """One forward pass in training mode; the pullback is reverse-mode autograd on the flat vector."""
        weights = model.weights.detach().requires_grad_()
        tensors = self._named(Model(weights, model.buffers))
        with torch.enable_grad():
            outputs = self._run(tensors, inputs)

        def pullback(cotangent: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(outputs, weights, cotangent)
            return gradient

        # BatchNorm writes its statistics into the tensors it was given, which are copies of ours.
        buffers = self._statistics({name: tensors[name] for name in self._buffers})
        return Scored(outputs.detach(), buffers, pullback)

    @torch.no_grad()
    def predict(self, model: Model, inputs: Tensor, rows: int = 8192) -> Tensor:
        """Raw outputs in evaluation mode, in parts of so many rows, on the CPU."""
        module = self.module(model)
        with self._casting():
            parts = [_scores(module(self.cast(part.clone())), len(part)).cpu() for part in torch.split(inputs, rows)]
        return torch.cat(parts).to(self.dtype)

    def cast(self, inputs: Tensor) -> Tensor:
        """Inputs on the model's device; floats in the model's dtype, integers (uint8 images) as they are."""
        return inputs.to(self.device, self.dtype if inputs.is_floating_point() else inputs.dtype)

    def pure(self, weights: Tensor, buffers: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs in training mode and the buffers after them, as a pure function that compilers can trace."""
        tensors = self._named(Model(weights, buffers))
        outputs = self._run(tensors, inputs)
        return outputs, self._statistics({name: tensors[name] for name in self._buffers})

    def _run(self, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
        self._module.train()
        with self._casting():
            return _scores(functional_call(self._module, tensors, (inputs,)), len(inputs)).to(self.dtype)

    def _casting(self) -> torch.autocast:
        # Its cache of cast weights would outlive a captured graph.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False)

    def _statistics(self, buffers: Mapping[str, Tensor]) -> Tensor:
        # At least float32: a count or an index kept in bfloat16 stands still at 256.
        return self._flat(buffers, torch.promote_types(self.dtype, torch.float32) if buffers else self.dtype)

    def _flat(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        parts = [t.detach().reshape(-1).to(dtype) for t in tensors.values()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=self.device)

    def _named(self, model: Model) -> dict[str, Tensor]:
        named = _cut(model.weights, self._parameters)
        for name, part in _cut(model.buffers, self._buffers).items():
            like = self._buffers[name]
            named[name] = part.clone() if like.is_floating_point() else part.round()
            named[name] = named[name].to(like.dtype)
        return named


def _cut(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # One split, whose backward is one concatenation; slicing would write a full-size gradient per parameter.
    parts = torch.split(flat, [t.numel() for t in like.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def _scores(outputs: object, rows: int) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model's output is a {type(outputs).__name__}; it must be one tensor of scores")
    if outputs.ndim not in (1, 2) or len(outputs) != rows:
        shape = tuple(outputs.shape)
        raise ValueError(
            f"the model's output has shape {shape} for {rows} rows; it must be [rows], [rows, 1] or [rows, E]"
        )
    return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
