"""The suite of a stage rule: its stages fill every budget."""

from __future__ import annotations

from fedauc.stages import Budget, StageRule
from fedauc.testing._expectations import check_configuration, expect


def check_stage_rule(rule: StageRule) -> None:
    """Check a stage rule: its configuration, and its stages for short and long runs."""
    check_configuration(rule, StageRule)
    for cycles in (1, 2, 3, 7, 100):
        check_stages(rule, cycles)


def check_stages(rule: StageRule, cycles: int) -> None:
    """The stages have as many cycles as the budget, each with a learning rate above 0 and a local step."""
    budget = Budget(cycles, learning_rate=0.1, local_steps=4, cycle_length=8, per_round=6)
    stages = rule.divide_budget(budget)
    total = sum(stage.cycles for stage in stages)
    expect(total == cycles, f"the stages have {total} cycles; the budget has {cycles}")
    for number, stage in enumerate(stages):
        expect(stage.cycles >= 1 and stage.local_steps >= 1, f"stage {number} has no cycle or no local step: {stage}")
        expect(stage.learning_rate > 0, f"stage {number} has a learning rate of {stage.learning_rate}")
    expect(stages == rule.divide_budget(budget), "dividing the same budget twice gives different stages")
