"""A small transformer that scores sequences of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.models.model import MAX_WIDTH, ModelConfig, check_layer_widths

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Transformer(ModelConfig):
    """Embedded tokens and positions, a few blocks of attention, the mean over the positions, and one score.

    A row is a sequence of int32 or int64 token ids from 0 to `vocabulary` - 1, all of one length; a token that fills
    up shorter sequences is a token like any other. Vaswani et al., Attention is all you need, NeurIPS 2017, with the
    norms before each layer.
    """

    name: ClassVar[str] = "transformer"

    vocabulary: int = option(1000, "Number of different tokens; ids are below it.", at_least=1)
    width: int = option(32, "Length of an embedding; a multiple of heads.", at_least=1, at_most=MAX_WIDTH)
    heads: int = option(4, "Attention heads of a block.", at_least=1)
    blocks: int = option(2, "Blocks of attention.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_widths("width", (self.width, 4 * self.width))
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; it must be a multiple of the {self.heads} heads: change either")

    def check_inputs(self, inputs: Tensor) -> None:
        """Refuse rows that hold no token ids, or ids beyond the vocabulary."""
        if str(inputs.dtype) not in ("torch.int32", "torch.int64"):
            remedy = "use data such as synthetic-tokens, or another model"
            raise ValueError(f"model 'transformer' needs token ids (integers), but rows are {inputs.dtype}: {remedy}")
        smallest, largest = int(inputs.min()), int(inputs.max())
        if smallest < 0:
            raise ValueError(f"rows hold the token id {smallest}; it must be at least 0: number the tokens from 0")
        if largest >= self.vocabulary:
            bound, remedy = f"it must be below vocabulary, which is {self.vocabulary}", f"raise it to {largest + 1}"
            raise ValueError(f"rows hold the token id {largest}; {bound}: {remedy} (--model.vocabulary {largest + 1})")

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The transformer for sequences of the length of a row."""
        from fedauc.models._layers import TokenTransformer

        if len(input_shape) != 1:
            raise ValueError(f"input_shape is {input_shape}; the transformer takes rows of token ids, one per position")
        return TokenTransformer(self.vocabulary, input_shape[0], self.width, self.heads, self.blocks)
