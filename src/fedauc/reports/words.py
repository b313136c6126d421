"""What the options mean, in a few words each, for help."""

from __future__ import annotations

from collections.abc import Mapping

from fedauc.data.augmentation import AUGMENTS
from fedauc.data.weighting import WEIGHTINGS
from fedauc.engines import AUTO, engines
from fedauc.experiments.options import Option

WORDS: Mapping[str, str] = {
    "stage-output": "the model a stage ends with",
    "cycles": "visits to each group",
    "learning-rate": "length of a step; 0.01 for the minimax methods, else",
    "local-steps": "steps of a visit",
    "positives": "positive rows of a step",
    "negatives": "negative rows of a step",
    "weighting": f"how much a client counts, {'|'.join(WEIGHTINGS)}",
    "augment": f"what is done to images, {'|'.join(AUGMENTS)}",
    "seed": "start, draws of clients and rows",
    "dtype": "of weights and rows",
    "precision": "passes in float32, or mixed with bfloat16",
    "device": "where to train, cpu|cuda|cuda:1",
    "engine": f"how clients are run, {'|'.join((AUTO, *engines()))}",
    "data-seed": "split, removal, label noise, partition",
    "evaluate-every": "cycles between evaluations",
    "checkpoint-every": "cycles between checkpoints",
    "remove-positives": "share of training positives dropped",
    "positive-rate": "positives are dropped until rows have at most this share",
    "flip-positives": "share of training positives relabelled",
    "flip-negatives": "share of training negatives relabelled",
    "data": "the dataset, creditcard unless given",
    "partition": "who holds which rows, natural unless given",
    "model": "the scorer, linear unless given",
    "objective": "the loss, the method's own unless given",
    "participation": "who takes part when, the method's own unless given",
    "participation.groups": "K; the data's own groups, else at most 10, unless given",
    "participation.per-round": "M; as many as a group has unless given",
    "stages": "how step and length change, milestones unless given",
}
"""The options that stand for themselves; what a member's parameters mean is said by `fedauc list`."""


def explained(option: Option) -> str:
    """The help of an option: its meaning, then its choices and its default."""
    words = WORDS.get(option.name)
    return f"{words}: {option.help}" if words else option.help
