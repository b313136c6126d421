"""How to train, whatever the data and the model: a frozen recipe. `assembly.py` makes it run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from fedauc.algorithms import find_methods
from fedauc.data.augmentation import AUGMENTS
from fedauc.data.weighting import WEIGHTINGS
from fedauc.discovery import lookup, read_declared_members, refuse_class
from fedauc.experiments.presets import find_settings
from fedauc.fields import check_fields, describe, option
from fedauc.interfaces import Algorithm, BatchSize, Mean, Participation, ServerOptimizer, UploadTransform, Wrapper
from fedauc.objectives import find_objectives
from fedauc.participation import find_participations
from fedauc.server_optimizers import find_server_optimizers
from fedauc.server_optimizers.plain import Plain
from fedauc.stages import MAX_CYCLES, MAX_LOCAL_STEPS, Milestones, StageOutput, StageRule, find_stage_rules
from fedauc.transforms import find_means, find_transforms
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from fedauc.transforms.weighted_mean import WeightedMean
from fedauc.uploads import UploadPipeline
from fedauc.wrappers import find_wrappers
from fedauc.wrappers.example_dp import ExampleDP

ENGINES = {
    "auto": "The fastest engine that fits the model, the device and the length of the run.",
    **read_declared_members("fedauc.engines", "Simulator"),
}
"""Every engine with a line of description; the engines themselves import torch's compiler, which takes seconds."""


MOST_EPSILON = 1e4
"""The largest budget that noise is calibrated for."""

DEFAULT_WEIGHTING = "pooled"
"""Every row of a class counts the same, whichever client holds it; docs/methods.md has the measurements."""

PRIVATE_WEIGHTING = "clients"
"""The default of a private run. Its class totals are noised: for `pooled` by as much as `max_rows` rows, which can be
many times the positives that there are, and a total that is far too low multiplies every step. With `example-dp`, each
step's noise is the same for all clients, and `pooled` would bury the gradients of small ones in it."""

DEFAULT_EMA_DECAY = 0.9
"""Share of the moving average that stays from round to round."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm, a schedule, and the numbers of a run.

    >>> recipe = Recipe.of("cycp-pairwise", cycles=5, groups=4, per_round=2)
    >>> recipe.participation.groups, recipe.learning_rate
    (4, 0.1)
    """

    method: str = field(metadata=describe("Name of the method; its defaults fill what is not given."))
    algorithm: Algorithm = field(metadata=describe("What clients and server compute."))
    participation: Participation = field(metadata=describe("Who takes part in which round."))
    wrappers: tuple[Wrapper, ...] = option((), "Changes of the local steps, the innermost first.")
    stages: StageRule = option(Milestones(), "How learning rate and length change from stage to stage.")
    stage_output: StageOutput = option("last", "The model that a stage ends with: its last one, or an average.")
    ema_decay: float = option(
        DEFAULT_EMA_DECAY,
        "Share of the moving average that stays from round to round, with stage output ema.",
        above=0,
        below=1,
    )
    evaluated_model: Literal["auto", "last", "average"] = option(
        "auto",
        "Which model is evaluated: the last, or the stage's average so far; auto is the average with ema only. The "
        "last record of a stage always shows the model that the stage passes on.",
    )
    transforms: tuple[UploadTransform, ...] = option(
        (), "What happens to an upload on its way to the server, in order."
    )
    mean: Mean = option(WeightedMean(), "How the uploads of a round become one.")
    server_optimizer: ServerOptimizer = option(Plain(), "How the server moves the model by the mean change.")
    cycles: int = option(30, "How often each group of clients is visited.", at_least=1, at_most=MAX_CYCLES)
    learning_rate: float = option(0.1, "Learning rate of the clients' local steps; the method has its own.", above=0)
    local_steps: int = option(16, "Local steps of a visit.", at_least=1, at_most=MAX_LOCAL_STEPS)
    positives: int = option(16, "Positive rows of a local step.", at_least=1)
    negatives: int = option(16, "Negative rows of a local step.", at_least=1)
    weighting: str = option(
        DEFAULT_WEIGHTING,
        f"How much a client counts in the loss; {PRIVATE_WEIGHTING} in a private run unless given.",
        choices=WEIGHTINGS,
    )
    augment: str = option("none", "How training images are augmented.", choices=AUGMENTS)
    patience: int | None = option(None, "Evaluations without a better validation metric before stopping.", at_least=1)
    keep: Literal["last", "best"] = option("last", "Which model a run ends with: the last, or the best on validation.")
    epsilon: float | None = option(
        None,
        "Privacy budget of the run: noise is added so that no client can be recognised.",
        above=0,
        at_most=math.inf,
    )
    delta: float = option(
        1e-5, "Probability with which epsilon may fail; below one over the clients.", above=0, below=1
    )
    stop_at_epsilon: float | None = option(
        None, "Stop a private run before it has spent more than this epsilon.", above=0
    )
    private_evaluation: bool = option(
        False,
        "Whether the AUC of a private run is estimated from noised histograms of its clients' held-out rows, within "
        "the budget; otherwise held-out rows count as public.",
    )
    noise_source: Literal["seed", "secret"] = option(
        "seed", "Whether noise follows from the seed, so that it can be repeated, or from a secret of the run."
    )
    seed: int = option(0, "Seed of the initial model and of the draws of clients and rows.")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = option("float32", "Type of weights and rows.")
    precision: Literal["full", "mixed"] = option("full", "Forward and backward passes in dtype, or with bfloat16.")
    device: str = option("cpu", "Where to train: cpu, cuda or cuda:1.")
    engine: str = option("auto", "How clients are run; auto takes the fastest that fits.", choices=ENGINES)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.precision == "mixed" and self.dtype != "float32":
            raise ValueError(
                f"precision is 'mixed', but dtype is {self.dtype!r}; mixed precision keeps float32 weights"
            )
        check_device(self.device)
        _check_members("wrappers", self.wrappers, Wrapper)
        _check_members("transforms", self.transforms, UploadTransform)
        self._check_privacy()
        if self.evaluated_model == "average" and self.stage_output == "last":
            remedy = "use --stage-output cycle_mean, round_mean or ema"
            raise ValueError(
                f"evaluated_model is 'average', but stage_output is 'last', which has no average; {remedy}"
            )
        if self.ema_decay != DEFAULT_EMA_DECAY and self.stage_output != "ema":
            remedy = f"use --stage-output ema, or leave ema_decay at {DEFAULT_EMA_DECAY}"
            raise ValueError(
                f"ema_decay is {self.ema_decay}, but stage_output is {self.stage_output!r}, which ignores it; {remedy}"
            )
        parts = (
            ("algorithm", Algorithm),
            ("participation", Participation),
            ("stages", StageRule),
            ("mean", Mean),
            ("server_optimizer", ServerOptimizer),
        )
        for name, kind in parts:
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be a {kind.__name__}, such as Recipe.of makes"
                )
        UploadPipeline(self.transforms, self.mean)

    def _check_privacy(self) -> None:
        """Add `client-dp` where a budget asks for privacy, and refuse a budget that contradicts the noise."""
        transform = next((member for member in self.transforms if isinstance(member, ClientDP)), None)
        protects_examples = any(isinstance(member, ExampleDP) for member in self.wrappers)
        if protects_examples and transform is not None:
            raise ValueError(
                "the recipe has both 'client-dp' and 'example-dp'; a budget is for one of them: leave one out"
            )
        if protects_examples and self.private_evaluation:
            raise ValueError(
                "private_evaluation is true, but 'example-dp' protects training rows alone; use 'client-dp', or leave "
                "private_evaluation out"
            )
        if self.epsilon is not None and MOST_EPSILON < self.epsilon < math.inf:
            raise ValueError(
                f"epsilon is {self.epsilon:g}; beyond {MOST_EPSILON:g} it promises nothing: use inf for no privacy"
            )
        for name in ("delta", "noise_source"):
            default = next(setting.default for setting in fields(Recipe) if setting.name == name)
            if not self.is_private and getattr(self, name) != default:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but the run is not private; set epsilon as well")
        if protects_examples:
            return
        if transform is None and self.epsilon is not None:
            transform = ClientDP()
            # What was clipped is noised and summed: a secure sum comes after it.
            sums = tuple(member for member in self.transforms if isinstance(member, SecureSum))
            others = tuple(member for member in self.transforms if not isinstance(member, SecureSum))
            if encoding := next((member.name for member in others if member.encodes), None):
                raise ValueError(
                    f"transforms lists {encoding!r}, and epsilon adds {transform.name!r}, whose bound on an upload "
                    f"{encoding!r} would break: leave {encoding!r} out"
                )
            object.__setattr__(self, "transforms", (*others, transform, *sums))
        if transform is None:
            if self.stop_at_epsilon is not None:
                raise ValueError(
                    f"stop_at_epsilon is {self.stop_at_epsilon:g}, but the run is not private; set epsilon as well"
                )
            if self.private_evaluation:
                raise ValueError("private_evaluation is true, but the run is not private; set epsilon as well")
            return
        if transform.noise_multiplier is None and self.epsilon is None:
            raise ValueError(
                "client-dp has neither a noise multiplier nor a budget; set --epsilon, or "
                "--transforms.client-dp.noise-multiplier"
            )
        if transform.noise_multiplier is not None and self.epsilon is not None:
            raise ValueError(
                f"epsilon is {self.epsilon:g} and noise_multiplier is {transform.noise_multiplier:g}; each determines "
                "the other: give one of them"
            )
        if transform.is_unlimited and self.epsilon != math.inf and transform.noise_multiplier != 0:
            raise ValueError(
                "clip is inf, so that nothing bounds what a client changes, and no noise hides it; lower clip, or use "
                "epsilon inf for a run without privacy"
            )
        if transform.standardization == "private" and self.epsilon is None:
            raise ValueError(
                "standardization is 'private', but there is no budget of which it could take a share; set epsilon "
                "instead of noise_multiplier"
            )
        if (transform.standardization == "private") != bool(transform.column_bounds):
            raise ValueError(
                f"standardization is {transform.standardization!r} and column_bounds is {transform.column_bounds}; "
                "private standardisation needs the largest absolute value of each column, in its own unit, as far as "
                "it is public; larger values are cut: give --transforms.client-dp.column-bounds, one number per column"
            )

    @staticmethod
    def of(method: str, **settings: Any) -> Recipe:
        """A method with its defaults; settings are fields of the recipe, the algorithm or the schedule.

        The setting `preset`, as `fedauc list presets` shows them, replaces the defaults; other settings win over it.
        """
        defaults = lookup("method", method, find_methods())
        settings = {**_preset_settings(settings.pop("preset", None), method), **settings}
        for name, value in settings.items():
            refuse_class(name, value)
        recipe_fields = _field_names(Recipe)
        recipe = dict(defaults.settings) | {name: settings.pop(name) for name in recipe_fields & set(settings)}
        _resolve_member_names(recipe, settings)
        participation = recipe.pop("participation", None)
        if participation is None:
            participation = lookup("participation", defaults.participation, find_participations())()
        algorithm = recipe.pop("algorithm", None) or defaults.algorithm(**dict(defaults.parameters))
        participation, algorithm = (_replace_fields(member, settings) for member in (participation, algorithm))
        if settings:
            _refuse_schedule_setting(next(iter(settings)), participation)
            valid_names = recipe_fields | _field_names(algorithm) | _field_names(participation)
            # Python has no --help that could list them.
            lookup(f"setting of {method}", next(iter(settings)), dict.fromkeys(valid_names), listed=len(valid_names))
        learning_rate = recipe.pop("learning_rate", defaults.learning_rate)
        built = Recipe(
            method=method, algorithm=algorithm, participation=participation, learning_rate=learning_rate, **recipe
        )
        return built if "weighting" in recipe else built.with_default_weighting()

    def with_default_weighting(self) -> Recipe:
        """The recipe with the weighting that it has where none is chosen; an infinite budget protects nobody."""
        weighting = PRIVATE_WEIGHTING if self.is_private and self.epsilon != math.inf else DEFAULT_WEIGHTING
        return self if self.weighting == weighting else dataclasses.replace(self, weighting=weighting)

    @property
    def is_private(self) -> bool:
        """Whether the recipe asks for differential privacy, of clients or of examples."""
        members = (*self.transforms, *self.wrappers)
        return self.epsilon is not None or any(isinstance(member, (ClientDP, ExampleDP)) for member in members)

    @property
    def uploads(self) -> UploadPipeline:
        """What happens to uploads; transforms that do not fit together are refused."""
        return UploadPipeline(self.transforms, self.mean, self.seed)

    @property
    def evaluates_average(self) -> bool:
        """Whether the stage's average so far is evaluated, instead of the last model."""
        return self.evaluated_model == "average" or (self.evaluated_model == "auto" and self.stage_output == "ema")

    @property
    def batch(self) -> BatchSize:
        """Active rows per local step."""
        return BatchSize(self.positives, self.negatives)


def list_decided(method: str, preset: str | None) -> set[str]:
    """The settings that a method or a preset decides for itself; the others have the recipe's defaults."""
    return {*dict(lookup("method", method, find_methods()).settings), *_preset_settings(preset, method)}


def _preset_settings(preset: str | None, method: str) -> Mapping[str, Any]:
    return {} if preset is None else find_settings(preset, method)


def check_device(device: str) -> None:
    """Refuse a device that does not exist on this machine."""
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:0'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; use 'cpu'")


def _resolve_member_names(recipe: dict[str, Any], settings: dict[str, Any]) -> None:
    """Replace names of members, such as `objective="sigmoid"`, by the members with their defaults."""
    families: dict[str, Mapping[str, type]] = {
        "participation": find_participations(),
        "stages": find_stage_rules(),
        "objective": find_objectives(),
        "mean": find_means(),
        "server_optimizer": find_server_optimizers(),
    }
    for family, members in families.items():
        for values in (recipe, settings):
            if isinstance(values.get(family), str):
                values[family] = lookup(family, values[family], members)()
    lists: dict[str, Mapping[str, type]] = {"transforms": find_transforms(), "wrappers": find_wrappers()}
    for family, members in lists.items():
        value = recipe.get(family, ())
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else (value,)
        recipe[family] = tuple(lookup(family, item, members)() if isinstance(item, str) else item for item in items)


def _refuse_schedule_setting(name: str, participation: Any) -> None:
    """Refuse a setting that belongs to another schedule than the one of the recipe."""
    if not isinstance(participation, Participation):
        raise ValueError(f"participation is {participation!r}; it must be a Participation, such as Cyclic()")
    if any(name in _field_names(member) for member in find_participations().values()):
        parameters = ", ".join(field.name for field in fields(participation)) or "no parameters"
        schedule = getattr(participation, "name", type(participation).__name__)
        raise ValueError(f"{name} is not a parameter of the participation {schedule!r}, which has: {parameters}")


def _check_members(name: str, members: Any, kind: type) -> None:
    """Refuse a field that is no tuple of members of a family."""
    if not isinstance(members, tuple) or not all(isinstance(member, kind) for member in members):
        raise ValueError(f"{name} is {members!r}; it must be a tuple of {kind.__name__}s, such as Recipe.of makes")


def _field_names(member: Any) -> set[str]:
    return {field.name for field in fields(member)}


def _replace_fields(member: Any, settings: dict[str, Any]) -> Any:
    """The member with those settings that are its fields; they are removed from `settings`."""
    if not dataclasses.is_dataclass(member) or isinstance(member, type):
        return member
    changes = {name: settings.pop(name) for name in _field_names(member) & set(settings)}
    return dataclasses.replace(member, **changes)
