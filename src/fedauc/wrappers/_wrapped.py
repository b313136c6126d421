"""An algorithm whose client methods go through a wrapper; the server's methods are those of the inner algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

from fedauc.interfaces import (
    Algorithm,
    Batch,
    Cohort,
    Download,
    Model,
    Network,
    Phase,
    Server,
    Setting,
    Upload,
    Wrapper,
)
from fedauc.trees import Tree, is_empty

if TYPE_CHECKING:
    from torch import Tensor


class WrappedState(NamedTuple):
    """A local state or client state: the inner algorithm's, and the wrapper's."""

    inner: Tree
    wrapper: Tree


@final
@dataclass(frozen=True, kw_only=True)
class WrappedAlgorithm(Algorithm):
    """`inner`, with its local steps changed by `wrapper`."""

    inner: Algorithm
    wrapper: Wrapper

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scoring_pass", "emits_histograms", "needs_places"):
            object.__setattr__(self, name, getattr(self.inner, name))
        object.__setattr__(self, "needs_keys", self.inner.needs_keys or self.wrapper.needs_keys)
        personal = self.inner.has_personal_models or self.wrapper.has_personal_models
        object.__setattr__(self, "has_personal_models", personal)

    def without_server_settings(self) -> WrappedAlgorithm:
        """The same wrapper around the inner algorithm without its server's settings."""
        return replace(self, inner=self.inner.without_server_settings())

    def initial_client_state(self, download: Download) -> Tree:
        """Both states; `()` where clients remember nothing."""
        inner = self.inner.initial_client_state(download)
        wrapper = self.wrapper.initial_client_state(self.inner, download)
        return () if is_empty(inner) and is_empty(wrapper) else WrappedState(inner, wrapper)

    def begin(self, download: Download, client_state: Tree) -> WrappedState:
        """The inner algorithm begins, then the wrapper."""
        inner_state, wrapper_state = client_state or ((), ())
        local = self.inner.begin(download, inner_state)
        return WrappedState(*self.wrapper.begin(self.inner, download, local, wrapper_state))

    def step(self, network: Network, download: Download, local: WrappedState, batch: Batch) -> tuple[Tree, Tree]:
        """The wrapper's step, which takes the inner one."""
        inner, carried, emitted = self.wrapper.step(self.inner, network, download, *local, batch)
        return WrappedState(inner, carried), emitted

    def monitored_loss(self, network: Network, download: Download, local: WrappedState, batch: Batch) -> Tensor:
        """The inner algorithm's loss."""
        return self.inner.monitored_loss(network, download, local.inner, batch)

    def finish(self, download: Download, client_state: Tree, local: WrappedState, emitted: Tree) -> tuple[Upload, Tree]:
        """The inner algorithm finishes, then the wrapper."""
        inner_state, wrapper_state = client_state or ((), ())
        upload, inner_state = self.inner.finish(download, inner_state, local.inner, emitted)
        upload, wrapper_state = self.wrapper.finish(self.inner, upload, local.inner, local.wrapper, wrapper_state)
        return upload, WrappedState(inner_state, wrapper_state) if client_state else ()

    def local_model(self, local: WrappedState) -> Model:
        """The model of the inner local state."""
        return self.inner.local_model(local.inner)

    def replace_local_model(self, local: WrappedState, model: Model) -> WrappedState:
        """Another model in the inner local state."""
        return local._replace(inner=self.inner.replace_local_model(local.inner, model))

    def init(self, setting: Setting, model: Model) -> Server:
        """As the inner algorithm."""
        return self.inner.init(setting, model)

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """As the inner algorithm."""
        return self.inner.dispatch(setting, server, cohort, phase)

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """As the inner algorithm."""
        return self.inner.merge(setting, server, reduced, cohort, phase)

    def extract_model(self, shared: Tree) -> Model:
        """As the inner algorithm."""
        return self.inner.extract_model(shared)

    def personal_model(self, model: Model, client_state: Tree) -> Model:
        """The inner algorithm's, then the wrapper's, where they have personal models."""
        inner_state, wrapper_state = client_state or ((), ())
        if self.inner.has_personal_models:
            model = self.inner.personal_model(model, inner_state)
        return self.wrapper.personal_model(model, wrapper_state) if self.wrapper.has_personal_models else model

    def replace_model(self, shared: Tree, model: Model) -> Tree:
        """As the inner algorithm."""
        return self.inner.replace_model(shared, model)

    def stage_output(self, last: Tree, mean: Tree) -> Tree:
        """As the inner algorithm."""
        return self.inner.stage_output(last, mean)

    def diagnostics(self, shared: Tree) -> dict[str, Tensor]:
        """As the inner algorithm."""
        return self.inner.diagnostics(shared)


def unwrap_algorithm(algorithm: Algorithm) -> Algorithm:
    """The algorithm inside all wrappers."""
    return unwrap_algorithm(algorithm.inner) if isinstance(algorithm, WrappedAlgorithm) else algorithm


def list_wrappers(algorithm: Algorithm) -> list[Wrapper]:
    """The wrappers around an algorithm, the innermost first."""
    return [*list_wrappers(algorithm.inner), algorithm.wrapper] if isinstance(algorithm, WrappedAlgorithm) else []


def wrap_algorithm(
    algorithm: Algorithm, wrappers: Iterable[Wrapper], parameters: Mapping[str, int], buffers: Collection[str] = ()
) -> Algorithm:
    """The algorithm inside the first wrapper, inside the second, and so on, for a model with these parameters.

    `buffers` are the names of the model's buffers, such as the statistics of BatchNorm.
    """
    for wrapper in wrappers:
        algorithm = WrappedAlgorithm(
            objective=algorithm.objective,
            weight_decay=algorithm.weight_decay,
            inner=algorithm,
            wrapper=wrapper.bind(parameters),
        )
    for wrapper in list_wrappers(algorithm):
        wrapper.check_algorithm(algorithm, buffers)
    return algorithm
