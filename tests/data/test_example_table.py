"""The synthetic claims: the same for the same seed, with text, dates, missing values and few positives."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from cli_helpers import fedauc
from fedauc.data.example_table import make_claims


def test_claims_are_keyed_by_the_seed() -> None:
    assert make_claims(200, 0) == make_claims(200, 0)
    assert make_claims(200, 0) != make_claims(200, 1)


def test_the_command_writes_what_real_tables_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    labelled, unlabelled = tmp_path / "claims.csv", tmp_path / "new.csv"
    assert fedauc(capsys, "data", "example", str(labelled)).code == 0
    assert fedauc(capsys, "data", "example", str(unlabelled), "--rows", "300", "--seed", "1", "--no-label").code == 0
    claims, fresh = pd.read_csv(labelled), pd.read_csv(unlabelled)
    assert (len(claims), len(fresh)) == (8000, 300)
    assert [*fresh.columns, "fraud"] == list(claims.columns)
    # One claim in 25, and far more frauds among the dear ones.
    assert 0.03 < (claims.fraud == "yes").mean() < 0.05
    assert claims.amount[claims.fraud == "yes"].median() > 1.5 * claims.amount[claims.fraud == "no"].median()
    assert 0.03 < claims.patient_age.isna().mean() < 0.07
    sizes = claims.state.value_counts()
    assert sizes.max() > 5 * sizes.min()
    refused = fedauc(capsys, "data", "example", str(labelled))
    assert refused.code == 2
    assert f"{labelled} exists already; name another file" in refused.err
