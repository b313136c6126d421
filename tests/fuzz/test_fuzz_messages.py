"""Whatever arrives at a site or at the server, an answer leaves the site and the server's round goes on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedauc.federation.serialization import Payload
from fedauc.federation.site import Site
from federation.memory_grid import MemoryGrid, create_run, make_agreement, make_grid
from fuzz.fuzzing import damaged_bytes, damaged_documents, fuzz, limited_memory
from small_federations import held_out


class Recorded(NamedTuple):
    """A site, the messages that it was sent in a run, and what it answered."""

    site: Site
    messages: list[Payload]
    grid: MemoryGrid
    folder: Path


@pytest.fixture(scope="module", params=["scaffold", "cycp-pairwise"])
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    with tempfile.TemporaryDirectory() as folder:
        grid = make_grid(Path(folder) / "sites", test=held_out())
        site, messages = grid.sites["site-0"], list[Payload]()
        answer_message = site.answer_message

        def record_message(payload: Payload) -> Payload:
            messages.append(payload)
            return answer_message(payload)

        site.answer_message = record_message  # type: ignore[method-assign]
        settings: dict[str, Any] = {"participation": "cyclic"} if request.param == "scaffold" else {}
        create_run(make_agreement(request.param, {}, **settings), grid, Path(folder) / "run").train_to_end()
        site.answer_message = answer_message  # type: ignore[method-assign]
        kinds = {
            (header := message.read_header())["kind"] + str(header.get("phase", {}).get("scoring")): message
            for message in messages
        }
        yield Recorded(site, list(kinds.values()), grid, Path(folder))


@st.composite
def damaged_payloads(draw: st.DrawFn, payload: Payload) -> Payload:
    """A payload with a damaged header, as a document or as text, a damaged body, or both."""
    text, body = payload.header_text, payload.body
    what = draw(st.sampled_from(["document", "document", "text", "body", "both"]))
    if what in ("document", "both"):
        text = json.dumps(draw(damaged_documents(json.loads(text))))
    if what == "text":
        text = draw(damaged_bytes(text.encode())).decode("utf-8", "replace")
    if what in ("body", "both"):
        body = np.frombuffer(draw(damaged_bytes(body.tobytes())), np.uint8)
    return Payload(text, body)


@fuzz(120)
@given(st.data())
def test_a_site_answers_every_damaged_message(recorded: Recorded, data: st.DataObject) -> None:
    payload = data.draw(damaged_payloads(data.draw(st.sampled_from(recorded.messages))))
    with limited_memory():
        answer = recorded.site.answer_message(payload)
    assert answer.read_header()["kind"] in ("register", "visit", "evaluate", "refusal", "missing-state")
    assert "MemoryError" not in answer.header_text
    assert "\n" not in answer.header_text


@fuzz(12)
@given(st.data())
def test_a_server_goes_on_after_damaged_answers(recorded: Recorded, data: st.DataObject) -> None:
    """Every third answer of one site is damaged; the run ends with a result all the same."""
    with tempfile.TemporaryDirectory() as folder, limited_memory():
        grid = make_grid(Path(folder) / "sites", test=held_out())
        site, count = grid.sites["site-1"], 0
        answer_message = site.answer_message

        def damage_answer(payload: Payload) -> Payload:
            nonlocal count
            count += 1
            answer = answer_message(payload)
            return data.draw(damaged_payloads(answer)) if count % 3 == 2 else answer

        site.answer_message = damage_answer  # type: ignore[method-assign]
        run = create_run(make_agreement("cycp-pairwise", {"patience": 100}), grid, Path(folder) / "run")
        assert run.train_to_end()["final"] is not None
