"""A synthetic table of insurance claims, to try the commands on before one's own table is ready.

It has what real tables have: text, dates, missing values, sites of uneven size, and few positives.
"""

from __future__ import annotations

import csv
import io

import numpy as np

from fedauc import keys

STATES = (
    "AL",
    "AZ",
    "CA",
    "CO",
    "CT",
    "FL",
    "GA",
    "IL",
    "MA",
    "MI",
    "MN",
    "MO",
    "NC",
    "NJ",
    "NY",
    "OH",
    "PA",
    "TN",
    "TX",
    "WA",
)
SPECIALTIES = ("cardiology", "dentistry", "dermatology", "orthopaedics", "paediatrics", "psychiatry", "radiology")
HEADER = ("claim_id", "state", "specialty", "patient_age", "amount", "visits", "received", "first_claim", "fraud")


def make_claims(rows: int, seed: int) -> list[dict[str, str]]:
    """Claims as texts by column; about 4 % of them are frauds.

    Frauds are dear for the number of visits, more frequent in two specialties, and rarely a first claim.
    """
    generator = keys.numpy_generator(seed, "example table")
    # Large states have many times the rows of small ones.
    shares = 1 / np.arange(2, len(STATES) + 2)
    state = generator.choice(len(STATES), size=rows, p=shares / shares.sum())
    specialty = generator.integers(len(SPECIALTIES), size=rows)
    age, visits = generator.integers(18, 90, size=rows), 1 + generator.poisson(3, size=rows)
    is_first = generator.random(rows) < 0.3
    excess = generator.normal(size=rows)
    amount = np.exp(5 + 0.8 * np.log(visits) + 0.7 * excess)
    day = generator.integers(0, 730, size=rows)
    logit = -4.2 + 1.3 * excess + 1.2 * np.isin(specialty, (1, 6)) - 1.0 * is_first + 0.2 * generator.normal(size=rows)
    fraud = generator.random(rows) < 1 / (1 + np.exp(-logit))
    dates = np.datetime64("2024-01-01") + day
    lacks_age, lacks_specialty = generator.random((2, rows)) < 0.05
    columns = (
        [f"C{seed}-{row:06d}" for row in range(rows)],
        [STATES[number] for number in state],
        ["" if lacks else SPECIALTIES[number] for number, lacks in zip(specialty, lacks_specialty, strict=True)],
        ["" if lacks else str(years) for years, lacks in zip(age, lacks_age, strict=True)],
        [f"{value:.2f}" for value in amount],
        [str(count) for count in visits],
        [str(date) for date in dates],
        ["yes" if first else "no" for first in is_first],
        ["yes" if is_fraud else "no" for is_fraud in fraud],
    )
    return [dict(zip(HEADER, values, strict=True)) for values in zip(*columns, strict=True)]


def encode_claims(rows: int, seed: int, with_label: bool = True) -> bytes:
    """The claims as a CSV file, with or without the label.

    >>> print(encode_claims(1, 0, with_label=False).decode().splitlines()[0])
    claim_id,state,specialty,patient_age,amount,visits,received,first_claim
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, HEADER if with_label else HEADER[:-1], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(make_claims(rows, seed))
    return text.getvalue().encode()
