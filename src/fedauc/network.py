"""An nn.Module as a function of flat vectors of parameters and buffers."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedauc.interfaces import ForwardPass, Model, Network
from fedauc.split_vectors import KernelWindow, SplitVector, VectorSplit


class Compute(NamedTuple):
    """How a network runs: its device, bfloat16 autocasting (`mixed`), and images with their channels last in memory.

    GPUs convolve fastest with channels last. The flat vector then stores convolution weights in that order too, so it
    is valid inside this process only: what travels to other machines keeps the usual order.
    """

    device: str = "cpu"
    mixed: bool = False
    channels_last: bool = False


class ModuleNetwork(Network):
    """Any nn.Module whose output is one score per row (`[B]` or `[B, 1]`), or an embedding (`[B, E]`).

    Parameters that do not require a gradient stay as they are and never travel. Buffers (BatchNorm statistics) travel
    and are averaged as floats; integer ones are rounded when they are put back. In mixed precision, layers run in
    bfloat16 where torch.autocast allows it, while weights, gradients and scores keep their dtype.

    >>> network = ModuleNetwork(nn.Linear(3, 1))
    >>> network.initial_model().weights.shape
    torch.Size([4])
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None, compute: Compute | None = None) -> None:
        device, self.mixed, self.channels_last = compute or Compute()
        self.plain_module = copy.deepcopy(module).to(device=device, dtype=dtype)
        self._parameters = {n: p.detach() for n, p in self.plain_module.named_parameters() if p.requires_grad}
        self._buffers = dict(self.plain_module.named_buffers())
        if not self._parameters:
            raise ValueError("the model has 0 trainable parameters; it needs at least 1: check requires_grad")
        dtypes = {p.dtype for p in self._parameters.values()}
        if len(dtypes) > 1:
            raise ValueError(f"the model's parameters have dtypes {sorted(map(str, dtypes))}; use one: model.to(dtype)")
        (self.dtype,) = dtypes
        self.device = torch.device(device)
        self.parameter_names = tuple(self._parameters)
        self._scoring_copies: list[nn.Module] = []
        self._accepts_integers: bool | None = None

    @property
    def vector_split(self) -> VectorSplit:
        """The lengths of the parameters in the flat vector."""
        return VectorSplit(tuple(parameter.numel() for parameter in self._parameters.values()))

    @property
    def parameter_lengths(self) -> dict[str, int]:
        """The length of each parameter by its name, in the order of the flat vector."""
        return {name: parameter.numel() for name, parameter in self._parameters.items()}

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """The names of the buffers, in the order of their flat vector."""
        return tuple(self._buffers)

    def make_kernel_window(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> KernelWindow:
        """A window of a convolution's weights, as the flat vector stores them."""
        out, channels, *kernel = self._parameters[name].shape
        shape, axis = ((out, *kernel, channels), 1) if self.channels_last else ((out, channels, *kernel), 2)
        return KernelWindow(shape, axis, rows, columns)

    def initial_model(self) -> Model:
        """The module's parameters and buffers as flat vectors."""
        return Model(self._flatten_tensors(self._parameters, self.dtype), self._flatten_buffers(self._buffers))

    def build_module(self, model: Model) -> nn.Module:
        """A copy of the module with the given parameters and buffers, in evaluation mode."""
        return self._load_model(copy.deepcopy(self.plain_module), model)

    def call_flat(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in training mode as a pure function of flat weights, for modules without buffers."""
        parameters = self._split_by_name(weights, self._parameters)
        return self._run_module(self.plain_module, parameters, weights[:0], inputs)[0]

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """One forward pass in training mode; the pullback is reverse-mode autograd on the flat vector."""
        weights = model.weights.detach().requires_grad_()
        with torch.enable_grad():
            parameters, images = self._split_by_name(weights, self._parameters), self._lay_out_images(inputs)
            outputs, buffers = self._run_module(self.plain_module, parameters, model.buffers, images)

        def pullback(cotangent: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(outputs, weights, cotangent)
            return gradient

        return ForwardPass(outputs.detach(), buffers, pullback)

    def trace_clients(
        self, module: nn.Module, model: Model, inputs: Tensor, stacked: bool, split: VectorSplit
    ) -> ForwardPass:
        """The forward pass of a stack of clients, `[M, ...]` each, as pure functions that can be traced.

        `module` is this network's, or one with the same parameters. Unless `stacked`, M is 1 and vmap is not used.
        Split weights give a split gradient; stacked modules take convolution weights cropped to the split's windows.
        """
        weights: Tensor | SplitVector = model.weights
        if isinstance(weights, SplitVector):
            parts = split.list_parameters(weights) if stacked else split.list_full_parameters(weights)
        else:
            parts = list(torch.split(weights, list(self.vector_split.lengths), -1))
        all_parameters = self._name_parts(parts, self._parameters, dict(split.windows) if stacked else {})
        run = functools.partial(self._run_module, module)

        def forward(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            if stacked:
                mapped: tuple[Tensor, Tensor] = torch.func.vmap(run, randomness="error")(
                    parameters, model.buffers, inputs
                )
                return mapped
            single = {name: parameter[0] for name, parameter in parameters.items()}
            outputs, buffers = run(single, model.buffers[0], self._lay_out_images(inputs[0]))
            return outputs[None], buffers[None]

        differentiated: Any = torch.func.vjp(forward, all_parameters, has_aux=True)
        outputs, pull, buffers = differentiated

        def pullback(cotangent: Tensor) -> Any:
            (gradients,) = pull(cotangent)
            if isinstance(weights, SplitVector):
                ordered = [self._move_channels_last(gradient, 1).to(self.dtype) for gradient in gradients.values()]
                return split.split_gradient([gradient.reshape(len(gradient), -1) for gradient in ordered])
            return self._flatten_tensors(gradients, self.dtype, 1)

        return ForwardPass(outputs, buffers, pullback)

    @torch.no_grad()
    def predict(self, model: Model, inputs: Tensor, rows: int = 8192) -> Tensor:
        """Raw outputs in evaluation mode, so many rows at a time, on the CPU; never in bfloat16, which gives ties."""
        module, fresh_signature = self._take_scoring_copy(model)
        parts = [_check_scores(module(self.cast_inputs(part.clone())), len(part)) for part in torch.split(inputs, rows)]
        if fresh_signature is None or module_signature(module) == fresh_signature:
            self._scoring_copies.append(module)
        return torch.cat(parts).cpu()

    def cast_inputs(self, inputs: Tensor) -> Tensor:
        """Inputs on the model's device: floats in the model's dtype, uint8 images as they are.

        Other integers, such as token ids, stay too if the model accepts them, and become floats otherwise.
        """
        integers = not inputs.is_floating_point()
        if integers and inputs.dtype != torch.uint8 and self._accepts_integers is None:
            self._accepts_integers = self._try_integers(inputs[:1].to(self.device))
        keep = integers and (inputs.dtype == torch.uint8 or self._accepts_integers)
        return inputs.to(self.device, inputs.dtype if keep else self.dtype)

    @torch.no_grad()
    def _try_integers(self, row: Tensor) -> bool:
        """Whether the model runs on integers; an error about anything but their type is for the caller to see later."""
        module = copy.deepcopy(self.plain_module).eval()
        try:
            module(row)
        except (RuntimeError, NotImplementedError):
            logging.getLogger("fedauc").info("integer inputs become %s: the model accepts no integers", self.dtype)
            return False
        except IndexError:
            # The model looks them up in a table, which is too short.
            pass
        return True

    def _take_scoring_copy(self, model: Model) -> tuple[nn.Module, object]:
        """A copy of the module to score with, and its signature if the copy is new.

        Copies are reused, because making one takes longer than scoring thousands of small images on a GPU. A copy that
        evaluation has changed (its signature differs) is dropped. It is taken out of the list while it is in use, so
        that every thread has its own.
        """
        try:
            return self._load_model(self._scoring_copies.pop(), model), None
        except IndexError:
            with torch.inference_mode(False):
                module = copy.deepcopy(self.plain_module)
            signature = module_signature(module)
            return self._load_model(module, model), signature

    def _load_model(self, module: nn.Module, model: Model) -> nn.Module:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        weights, buffers = self._split_by_name(model.weights, self._parameters), self._unflatten_buffers(model.buffers)
        with torch.no_grad():
            for name, value in {**weights, **buffers}.items():
                tensors[name].copy_(value)
        return module.eval()

    def _run_module(
        self, module: nn.Module, parameters: dict[str, Tensor], buffers: Tensor, inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The outputs, and the flat buffers after them."""
        tensors = {**parameters, **self._unflatten_buffers(buffers)}
        module.train()
        # Autocast's cache of cast weights would outlive a captured graph.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            outputs = _check_scores(functional_call(module, tensors, (inputs,)), len(inputs)).to(self.dtype)
        # BatchNorm writes its statistics into the tensors it was given, which are copies of ours.
        return outputs, self._flatten_buffers({name: tensors[name] for name in self._buffers})

    def _lay_out_images(self, inputs: Tensor) -> Tensor:
        """Images with channels last in memory, if the network runs that way."""
        reorder = self.channels_last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if reorder else inputs

    def _flatten_buffers(self, buffers: Mapping[str, Tensor]) -> Tensor:
        # At least float32: a bfloat16 counter stops at 256.
        dtype = torch.promote_types(self.dtype, torch.float32) if buffers else self.dtype
        return self._flatten_tensors(buffers, dtype)

    def _unflatten_buffers(self, flat: Tensor) -> dict[str, Tensor]:
        """Copies of the buffers in their own dtypes."""
        buffers = {}
        for name, part in self._split_by_name(flat, self._buffers).items():
            like = self._buffers[name]
            buffers[name] = (part.clone() if like.is_floating_point() else part.round()).to(like.dtype)
        return buffers

    def _flatten_tensors(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, leading: int = 0) -> Tensor:
        """All tensors as one vector, after so many leading dimensions."""
        parts = [
            self._move_channels_last(tensor, leading).reshape(*tensor.shape[:leading], -1).to(dtype)
            for tensor in tensors.values()
        ]
        return torch.cat(parts, leading).detach() if parts else torch.zeros(0, dtype=dtype, device=self.device)

    def _move_channels_last(self, tensor: Tensor, leading: int) -> Tensor:
        return tensor.movedim(-3, -1) if self.channels_last and tensor.ndim - leading == 4 else tensor

    def _split_by_name(self, flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # One split, whose backward is one concatenation; slicing would write a full-size gradient per parameter.
        return self._name_parts(torch.split(flat, [tensor.numel() for tensor in like.values()], dim=-1), like)

    def _name_parts(
        self, parts: Sequence[Tensor], like: Mapping[str, Tensor], windows: Mapping[int, KernelWindow] | None = None
    ) -> dict[str, Tensor]:
        """Flat parts with the shapes and names of other tensors; weights inside a window have the window's sides."""
        shapes = [tensor.shape for tensor in like.values()]
        for position, window in (windows or {}).items():
            shapes[position] = torch.Size((*shapes[position][:2], window.rows[1], window.columns[1]))
        return {name: self._view_as(part, shape) for name, part, shape in zip(like, parts, shapes, strict=True)}

    def _view_as(self, part: Tensor, shape: torch.Size) -> Tensor:
        if not (self.channels_last and len(shape) == 4):
            return part.view((*part.shape[:-1], *shape))
        out, channels, height, width = shape
        return part.view(*part.shape[:-1], out, height, width, channels).movedim(-1, -3)


def module_signature(module: nn.Module) -> tuple[object, ...]:
    """What a module computes, apart from its trainable values: modules with equal signatures may share compiled code.

    Attributes that are not plain values count by identity, as do frozen parameters, so that in doubt nothing is shared.

    >>> module_signature(nn.Linear(2, 1)) == module_signature(nn.Linear(2, 1))
    True
    >>> module_signature(nn.Linear(2, 1)) == module_signature(nn.Linear(2, 1, bias=False))
    False
    """
    usual = set(vars(nn.Module()))
    layers: list[object] = []
    for name, layer in module.named_modules():
        attributes = {
            key: value for key, value in vars(layer).items() if key not in usual or (key.endswith("hooks") and value)
        }
        plain = [(key, value if _is_plain_value(value) else id(value)) for key, value in sorted(attributes.items())]
        layers.append((name, type(layer), tuple(plain)))
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    shapes = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
    frozen = [id(parameter) for parameter in module.parameters() if not parameter.requires_grad]
    return (*layers, *shapes, *frozen)


def _is_plain_value(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def _check_scores(outputs: object, rows: int) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model's output is a {type(outputs).__name__}; it must be one tensor of scores")
    if outputs.ndim not in (1, 2) or len(outputs) != rows:
        shape = tuple(outputs.shape)
        raise ValueError(
            f"the model's output has shape {shape} for {rows} rows; it must be [rows], [rows, 1] or [rows, E]"
        )
    return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
