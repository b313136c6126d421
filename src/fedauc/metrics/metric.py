"""What a metric is: how good a ranking is, as one number from labels and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fedauc.fields import check_fields

if TYPE_CHECKING:
    import numpy as np


class Measurement(NamedTuple):
    """The value of a metric, and the ends of its 95 % confidence interval where the metric defines one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Metric(ABC):
    """How good a ranking is: one number from labels and scores, of which higher is better.

    Its fields are numbers with defaults. In text a metric is its name and these numbers in order, such as `pauc@0.05`
    (see `fedauc.metrics.parse_metric`).
    """

    name: ClassVar[str]
    has_interval: ClassVar[bool] = False
    """Whether `measure` returns a confidence interval for scores."""

    takes_embeddings: ClassVar[bool] = False
    """Whether `measure` accepts embeddings `[n, e]` as well as scores `[n]`."""

    takes_classes: ClassVar[bool] = False
    """Whether `measure` accepts numbers of classes as labels, and scores `[n, C]`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The value for labels 0 or 1 `[n]` and one score per row `[n]`; there are rows of both classes."""

    @property
    def text(self) -> str:
        """The name with the arguments: what a configuration holds and a table shows."""
        arguments = ":".join(format(getattr(self, setting.name), ".12g") for setting in fields(self))
        return f"{self.name}@{arguments}" if arguments else self.name

    @property
    def label(self) -> str:
        """The heading of the metric in a table."""
        return self.text

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record: the value, and the ends of the interval where the metric has one."""
        return (self.text, f"{self.text}_low", f"{self.text}_high") if self.has_interval else (self.text,)
