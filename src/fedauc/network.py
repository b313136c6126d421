"""An nn.Module as a function of flat vectors: taken apart, run, and put back."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedauc.interfaces import ForwardPass, Model, Network
from fedauc.pieces import Cut, SplitVector, Window


class Compute(NamedTuple):
    """How a network runs: where, in bfloat16 where that is safe (`mixed`), and with images' channels last.

    Channels last is how a GPU convolves fastest. The flat vector then holds a convolution's weights in that order too,
    so it means something to this process only: what travels to other machines keeps the usual order.
    """

    device: str = "cpu"
    mixed: bool = False
    channels_last: bool = False


class ModuleNetwork(Network):
    """Any nn.Module whose output is one score per row (`[B]` or `[B, 1]`), or an embedding (`[B, E]`).

    Parameters that do not require a gradient stay as they are and never travel. Buffers (BatchNorm statistics) travel
    and are averaged as floats; integer ones are rounded when they are put back. In mixed precision, layers run in
    bfloat16 where torch.autocast lets them, while weights, gradients and scores stay as they are.

    >>> network = ModuleNetwork(nn.Linear(3, 1))
    >>> network.state().weights.shape
    torch.Size([4])
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None, compute: Compute | None = None) -> None:
        device, self.mixed, self._last = compute or Compute()
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
        self._spares: list[nn.Module] = []

    @property
    def cut(self) -> Cut:
        """Where the flat vector's parameters end."""
        return Cut(tuple(t.numel() for t in self._parameters.values()))

    @property
    def channels_last(self) -> bool:
        """Whether the flat vector holds convolutions' weights with their channels last."""
        return self._last

    def window(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Window:
        """A window of a convolution's weights, where the flat vector has them."""
        out, channels, *kernel = self._parameters[name].shape
        shape, axis = ((out, *kernel, channels), 1) if self._last else ((out, channels, *kernel), 2)
        return Window(shape, axis, rows, columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable parameters, in the flat vector's order."""
        return tuple(self._parameters)

    @property
    def plain(self) -> nn.Module:
        """The module itself, for engines that take it apart."""
        return self._module

    def call(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in training mode as a pure function of flat weights, for modules without buffers."""
        return self._run(self._module, self._cut(weights, self._parameters), weights[:0], inputs)[0]

    def state(self) -> Model:
        """The module's present parameters and buffers as flat vectors."""
        return Model(self._flat(self._parameters, self.dtype), self._statistics(self._buffers))

    def module(self, model: Model) -> nn.Module:
        """A copy of the module with the given state, in evaluation mode."""
        return self._filled(copy.deepcopy(self._module), model)

    def _filled(self, filled: nn.Module, model: Model) -> nn.Module:
        own = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
        values = {**self._cut(model.weights, self._parameters), **self._counters(model.buffers)}
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
        return filled.eval()

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """One forward pass in training mode; the pullback is reverse-mode autograd on the flat vector."""
        weights = model.weights.detach().requires_grad_()
        with torch.enable_grad():
            parameters = self._cut(weights, self._parameters)
            outputs, buffers = self._run(self._module, parameters, model.buffers, self._laid(inputs))

        def pullback(cotangent: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(outputs, weights, cotangent)
            return gradient

        return ForwardPass(outputs.detach(), buffers, pullback)

    def trace(self, module: nn.Module, model: Model, inputs: Tensor, stacked: bool, cut: Cut) -> ForwardPass:
        """The pass of a stack of clients, `[M, ...]` each, as pure functions; weights in pieces give such a gradient.

        `module` is this network's or one with the same parameters. Unless `stacked`, M is 1, and nothing is mapped.
        Stacked modules take weights inside their windows, as `cut` has them.
        """
        weights: Tensor | SplitVector = model.weights
        if isinstance(weights, SplitVector):
            parts = cut.parts(weights) if stacked else cut.whole(weights)
        else:
            parts = list(torch.split(weights, list(self.cut.lengths), -1))
        windows = dict(cut.windows) if stacked else {}
        own = self._named(parts, self._parameters, windows)

        def forward(pieces: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            run = functools.partial(self._run, module)
            if stacked:
                found: tuple[Tensor, Tensor] = torch.func.vmap(run, randomness="error")(pieces, model.buffers, inputs)
                return found
            single = {name: piece[0] for name, piece in pieces.items()}
            outputs, buffers = run(single, model.buffers[0], self._laid(inputs[0]))
            return outputs[None], buffers[None]

        found: Any = torch.func.vjp(forward, own, has_aux=True)
        outputs, pull, buffers = found

        def pullback(cotangent: Tensor) -> Any:
            (gradients,) = pull(cotangent)
            if isinstance(weights, SplitVector):
                turned = [self._turn(each, 1).to(self.dtype) for each in gradients.values()]
                return cut.gradient([each.reshape(len(each), -1) for each in turned])
            return self._flat(gradients, self.dtype, 1)

        return ForwardPass(outputs, buffers, pullback)

    @torch.no_grad()
    def predict(self, model: Model, inputs: Tensor, rows: int = 8192) -> Tensor:
        """Raw outputs in evaluation mode, in parts of so many rows, on the CPU; not mixed, since bfloat16 ties."""
        module, known = self._scorer(model)
        parts = [_scores(module(self.cast(part.clone())), len(part)) for part in torch.split(inputs, rows)]
        if known is None or signature(module) == known:
            self._spares.append(module)
        return torch.cat(parts).cpu()

    def _scorer(self, model: Model) -> tuple[nn.Module, object]:
        """A copy to score with, and what it was before if it is new: it is not kept if evaluation leaves traces in it.

        One is kept because making it takes longer than scoring thousands of small images on a GPU, and it is taken out
        while it is used, so that threads have one each.
        """
        try:
            return self._filled(self._spares.pop(), model), None
        except IndexError:
            with torch.inference_mode(False):
                made = copy.deepcopy(self._module)
            known = signature(made)
            return self._filled(made, model), known

    def cast(self, inputs: Tensor) -> Tensor:
        """Inputs on the model's device; floats in the model's dtype, integers (uint8 images) as they are."""
        return inputs.to(self.device, self.dtype if inputs.is_floating_point() else inputs.dtype)

    def _run(
        self, module: nn.Module, parameters: dict[str, Tensor], buffers: Tensor, inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs and the buffers after them."""
        tensors = {**parameters, **self._counters(buffers)}
        module.train()
        with self._casting():
            outputs = _scores(functional_call(module, tensors, (inputs,)), len(inputs)).to(self.dtype)
        # BatchNorm writes its statistics into the tensors it was given, which are copies of ours.
        return outputs, self._statistics({name: tensors[name] for name in self._buffers})

    def _laid(self, inputs: Tensor) -> Tensor:
        """Images with channels last in memory, where that is the way."""
        turned = self._last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if turned else inputs

    def _casting(self) -> torch.autocast:
        # Its cache of cast weights would outlive a captured graph.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False)

    def _statistics(self, buffers: Mapping[str, Tensor]) -> Tensor:
        # At least float32: a count or an index kept in bfloat16 stands still at 256.
        return self._flat(buffers, torch.promote_types(self.dtype, torch.float32) if buffers else self.dtype)

    def _counters(self, buffers: Tensor) -> dict[str, Tensor]:
        """Copies of the buffers in their own types."""
        found = {}
        for name, part in self._cut(buffers, self._buffers).items():
            like = self._buffers[name]
            found[name] = (part.clone() if like.is_floating_point() else part.round()).to(like.dtype)
        return found

    def _flat(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, leading: int = 0) -> Tensor:
        """One vector of them all, after so many leading dimensions."""
        parts = [self._turn(t, leading).reshape(*t.shape[:leading], -1).to(dtype) for t in tensors.values()]
        return torch.cat(parts, leading).detach() if parts else torch.zeros(0, dtype=dtype, device=self.device)

    def _turn(self, tensor: Tensor, leading: int) -> Tensor:
        return tensor.movedim(-3, -1) if self._last and tensor.ndim - leading == 4 else tensor

    def _cut(self, flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # One split, whose backward is one concatenation; slicing would write a full-size gradient per parameter.
        return self._named(torch.split(flat, [t.numel() for t in like.values()], dim=-1), like)

    def _named(
        self, parts: Sequence[Tensor], like: Mapping[str, Tensor], windows: Mapping[int, Window] | None = None
    ) -> dict[str, Tensor]:
        shapes = [t.shape for t in like.values()]
        for place, window in (windows or {}).items():
            shapes[place] = torch.Size((*shapes[place][:2], window.rows[1], window.columns[1]))
        return {name: self._shaped(part, shape) for name, part, shape in zip(like, parts, shapes, strict=True)}

    def _shaped(self, part: Tensor, shape: torch.Size) -> Tensor:
        if not (self._last and len(shape) == 4):
            return part.view((*part.shape[:-1], *shape))
        out, channels, height, width = shape
        return part.view(*part.shape[:-1], out, height, width, channels).movedim(-1, -3)


def signature(module: nn.Module) -> tuple[object, ...]:
    """What a module computes, apart from its trainable values: modules with the same one may share compiled code.

    Attributes that are not plain values count by identity, as do frozen parameters: better no sharing than a wrong one.

    >>> signature(nn.Linear(2, 1)) == signature(nn.Linear(2, 1)) != signature(nn.Linear(2, 1, bias=False))
    True
    """
    usual = set(vars(nn.Module()))
    found: list[object] = []
    for name, layer in module.named_modules():
        own = {
            key: value for key, value in vars(layer).items() if key not in usual or (key.endswith("hooks") and value)
        }
        plain = [(key, value if _is_plain(value) else id(value)) for key, value in sorted(own.items())]
        found.append((name, type(layer), tuple(plain)))
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    shapes = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
    frozen = [id(parameter) for parameter in module.parameters() if not parameter.requires_grad]
    return (*found, *shapes, *frozen)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def _scores(outputs: object, rows: int) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model's output is a {type(outputs).__name__}; it must be one tensor of scores")
    if outputs.ndim not in (1, 2) or len(outputs) != rows:
        shape = tuple(outputs.shape)
        raise ValueError(
            f"the model's output has shape {shape} for {rows} rows; it must be [rows], [rows, 1] or [rows, E]"
        )
    return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
