"""Real SuperNodes on loopback, with TLS and keys: the simulator's model, whoever is killed on the way.

Run with `make test-federation`. All tests together stay below eight minutes on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedauc.experiments.folder import RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.federation.app_folder import create_app_folder, create_key_pair
from fedauc.federation.local_federation import (
    SUPERLINK_NAME,
    LocalFederation,
    list_descendants,
    write_demo_sites,
)
from fedauc.federation.pausing import request_pause
from fedauc.federation.server import summarize_run
from fedauc.federation.site_control import SiteHome
from fedauc.metrics import auc
from fedauc.server_optimizers.momentum import Momentum
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.clip import Clip
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.secure_sum import SecureSum
from federation.attendance_trace import read_trace, replay_assembly
from federation.transports import (
    AGREEMENTS,
    SITES,
    assemble_sites,
    extract_weights,
    read_site_rows,
    read_trained_weights,
    simulate_weights,
)

pytestmark = pytest.mark.flower

SECONDS = 150.0
"""What a run of six rounds may take on a busy machine; a quiet one needs a third of it."""


def create_trial(folder: Path) -> LocalFederation:
    create_app_folder(folder, SITES)
    write_demo_sites(folder / "sites", list(SITES))
    return LocalFederation(folder)


def wait_until(trial: LocalFederation, condition: Callable[[], bool]) -> None:
    """Wait for something to happen while the run goes on."""
    end = time.monotonic() + SECONDS
    while not condition():
        log = trial.folder / "logs" / "run.log"
        assert time.monotonic() < end, f"it took too long: {log.read_text()[-2000:]}"
        assert trial.is_running("run"), f"the run ended: {log.read_text()[-2000:]}"
        time.sleep(0.1)


def wait_for_end(trial: LocalFederation) -> None:
    wait_until(trial, lambda: not trial.is_running("run"))


def count_received_messages(trial: LocalFederation, name: str) -> int:
    return (trial.folder / "logs" / f"{name}.log").read_text().count("received message")


def restart_until_accepted(trial: LocalFederation, name: str) -> None:
    """A SuperLink refuses a restarted node until two heartbeats of the old process (60 s) have failed."""
    activated = (trial.folder / "logs" / "superlink.log").read_text().count("Activated")
    end = time.monotonic() + 100
    while (trial.folder / "logs" / "superlink.log").read_text().count("Activated") == activated:
        assert time.monotonic() < end, "the node was not accepted again"
        if not trial.is_running(name):
            time.sleep(8)
            trial.start_site(name)
        time.sleep(0.2)


def test_a_node_killed_in_mid_round_returns_and_the_model_is_the_simulators(tmp_path: Path) -> None:
    """CyCp-Pairwise: three scoring rounds, three learning rounds. The killed node is one of the first group's two."""
    folder = tmp_path / "trial"
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run('cycles=1 deadline=120.0 method="cycp-pairwise"')
        wait_until(trial, lambda: count_received_messages(trial, "site-3") == 2)
        trial.stop_process("site-3", signal.SIGKILL)
        restart_until_accepted(trial, "site-3")
        wait_for_end(trial)
    summary = summarize_run(folder / "run")
    assert summary["status"] == "done"
    # Killed in round 0, it is back before that round's deadline and takes part in it.
    assert RunFolder(folder / "run").read_lines("attendance.jsonl")[0]["answered"] == ["site-0", "site-3"]
    assert {name: counts["answered"] for name, counts in summary["attendance"].items()} == dict.fromkeys(SITES, 2)
    expected = simulate_weights(folder, "cycp-pairwise", cycles=1)
    np.testing.assert_allclose(read_trained_weights(folder / "run"), expected, rtol=0, atol=1e-6)
    assert summary["records"][-1]["auc"] > 0.9


def test_every_agreement_gives_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """One federation, several runs: the algorithms do not know the transport. `test_nvflare.py` has the same."""
    folder = tmp_path / "trial"
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        for title, agreement in AGREEMENTS.items():
            run = folder / title.replace(" ", "-")
            settings = {**agreement.write_settings(), "out": str(run)}
            trial.start_run(" ".join(f"{name}={json.dumps(value)}" for name, value in settings.items()))
            wait_for_end(trial)
            expected = simulate_weights(folder, agreement.method, **agreement.settings)
            np.testing.assert_array_equal(read_trained_weights(run), expected, err_msg=title)
        check_choice_of_a_round(trial, folder / "choice")


def check_choice_of_a_round(trial: LocalFederation, run: Path) -> None:
    """One more run, which ends early: sites hold out a fifth of their training rows, and send histograms."""
    settings = 'cycles=12 deadline=120.0 method="cycp-fedavg" validation-fraction=0.2'
    settings += f' out="{run}" options="keep=best patience=1"'
    trial.start_run(settings)
    wait_for_end(trial)
    # Plans before it held out nothing, so that the sites' operators must approve this one.
    assert "must approve a plan with another part" in run.with_name("choice-failed.txt").read_text()
    for name in SITES:
        home = SiteHome(trial.folder / "sites" / name / "state")
        for digest in home.list_plans():
            home.decide(digest, "approved", "an operator")
    trial.start_run(settings)
    wait_for_end(trial)
    result, records = RunFolder(run).read_result(), RunFolder(run).read_records()
    assert result["stopped_early"].startswith("validation_auc has not risen above")
    assert result["kept_round"] == records[-2]["round"]
    recipe = Recipe.of("cycp-fedavg", engine="loop", cycles=12)
    training, _, state = assemble_sites(trial.folder, recipe, list(SITES), validation_fraction=0.2)[0]
    kept = next(finished for finished in training.rounds(state) if finished.phase.round == result["kept_round"])
    weights = extract_weights(recipe, kept)
    np.testing.assert_array_equal(read_trained_weights(run), weights)
    held_out = [read_site_rows(trial.folder, name, 0.2, 1) for name in SITES]
    inputs, labels = (np.concatenate([rows[side] for rows in held_out]) for side in (0, 1))
    exact = auc(labels, inputs @ weights[: inputs.shape[1]])
    assert result["final"]["validation_auc_low"] <= exact <= result["final"]["validation_auc_high"]
    assert json.loads((run / "delivery.json").read_text())["sites"] == dict.fromkeys(SITES, "delivered")


def find_worker(trial: LocalFederation, name: str) -> int:
    """The process of a site's resident worker."""
    (site,) = (pid for pid in trial.process_ids() if f"--key\0{trial.folder / 'keys' / name}\0" in read_command(pid))
    (worker,) = (pid for pid, _ in list_descendants(site) if "site_worker" in read_command(pid))
    return worker


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_killed_workers_are_replaced_within_the_round_and_the_model_is_the_simulators(tmp_path: Path) -> None:
    """One worker is killed between messages, one as soon as it has received one. Flower's own SuperNode takes part."""
    folder = tmp_path / "trial"
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.resident_workers = name != "site-2"
            trial.start_site(name)
        trial.start_run('cycles=3 deadline=120.0 method="cycp-pairwise" evaluation="none"')
        wait_until(trial, lambda: count_received_messages(trial, "site-1") == 1)
        os.kill(find_worker(trial, "site-1"), signal.SIGKILL)
        wait_until(trial, lambda: count_received_messages(trial, "site-3") >= 3)
        os.kill(find_worker(trial, "site-3"), signal.SIGKILL)
        wait_for_end(trial)
        outcome = trial.read_run_outcome()
    assert outcome.completed, outcome.reason
    summary = summarize_run(folder / "run")
    assert {name: counts["absent"] for name, counts in summary["attendance"].items()} == dict.fromkeys(SITES, 0)
    expected = simulate_weights(folder, "cycp-pairwise", cycles=3)
    np.testing.assert_allclose(read_trained_weights(folder / "run"), expected, rtol=0, atol=1e-6)


def test_a_failed_run_is_reported_with_the_site_and_the_reason(tmp_path: Path) -> None:
    """The only site of group b has labels 1 and 2: `flwr run` ends with 0, and the outcome says why."""
    folder = tmp_path / "trial"
    with create_trial(folder) as trial:
        labels = folder / "sites" / "site-1" / "rows" / "y.npy"
        np.save(labels, np.load(labels) + 1)
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run("cycles=1 deadline=60.0")
        wait_until(trial, lambda: "raised an exception" in (trial.folder / "logs" / "run.log").read_text())
        end = time.monotonic() + SECONDS
        while trial.is_running("run"):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert trial.exit_code("run") == 0
        outcome = trial.read_run_outcome()
    assert not outcome.completed
    assert outcome.reason.startswith("site 'site-1': ValueError; see the site's log")


def test_a_killed_superlink_is_restarted_and_the_run_resumed_to_the_same_model(tmp_path: Path) -> None:
    """CyCp-Minimax with an anchor per stage, error feedback at the sites and momentum at the server.

    A node whose key nobody registered is not accepted.
    """
    folder = tmp_path / "trial"
    options = "algorithm.prox=0.1 transforms=clip,quantize transforms.clip.norm=0.05 server-optimizer=momentum"
    settings = f'cycles=2 deadline=120.0 method="cycp-minimax" evaluation="none" options="{options}"'
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        create_key_pair(folder / "keys" / "stranger")
        trial.start_supernode("stranger", {"data": "none", "state": "none"})
        trial.start_run(settings)
        wait_until(trial, lambda: len(RunFolder(folder / "run").read_lines("attendance.jsonl")) >= 2)
        trial.stop_process("superlink", signal.SIGKILL)
        assert not (folder / "run" / "result.json").exists()
        trial.stop_process("run")
        trial.start_superlink()
        trial.start_run(f"{settings} resume=true")
        wait_for_end(trial)
        assert not trial.is_running("stranger")
        assert trial.exit_code("stranger") != 0
        assert "stranger" not in trial.run_flwr("supernode", "list", SUPERLINK_NAME)
    summary = summarize_run(folder / "run")
    assert summary["status"] == "done"
    assert [line["round"] for line in RunFolder(folder / "run").read_lines("attendance.jsonl")] == list(range(6))
    seams: dict[str, Any] = {"transforms": (Clip(norm=0.05), Quantize()), "server_optimizer": Momentum()}
    expected = simulate_weights(folder, "cycp-minimax", cycles=2, prox=0.1, **seams)
    np.testing.assert_allclose(read_trained_weights(folder / "run"), expected, rtol=0, atol=1e-6)


def test_secure_sums_and_noise_give_the_simulators_model(tmp_path: Path) -> None:
    """All four sites in every round, with clipped uploads and a histogram pool, masked on their way to the server.

    The server is trusted with the noise, which a simulation repeats from the run's secret.
    """
    folder = tmp_path / "trial"
    options = (
        "algorithm.pool=histogram participation=full transforms=client-dp,secure-sum "
        "transforms.client-dp.noise-multiplier=0.5 transforms.secure-sum.noise=server"
    )
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run(f'cycles=2 deadline=120.0 method="cycp-pairwise" evaluation="none" options="{options}"')
        wait_for_end(trial)
        log = (trial.folder / "logs" / "run.log").read_text()
    summary = summarize_run(folder / "run")
    assert summary["status"] == "done", log[-2000:]
    assert {name: counts["answered"] for name, counts in summary["attendance"].items()} == dict.fromkeys(SITES, 2)
    # Two exchanges per round, and the registration.
    assert all(count_received_messages(trial, name) >= 5 for name in SITES)
    secret = RunFolder(folder / "run").read_secret()
    transforms = (ClientDP(noise_multiplier=0.5), SecureSum(noise="server"))
    settings: dict[str, Any] = {"cycles": 2, "pool": "histogram", "participation": "full"}
    expected = simulate_weights(folder, "cycp-pairwise", secret, transforms=transforms, **settings)
    np.testing.assert_allclose(read_trained_weights(folder / "run"), expected, rtol=0, atol=1e-6)
    without_noise = simulate_weights(folder, "cycp-pairwise", **settings)
    assert np.abs(expected - without_noise).max() > 0.01


def test_a_run_is_paused_and_a_site_joins_before_it_goes_on(tmp_path: Path) -> None:
    """Site 3 is missing from the site table until the operator has paused the run at the end of a cycle."""
    folder = tmp_path / "trial"
    settings = 'cycles=4 deadline=120.0 method="cycp-fedavg" evaluation="none"'
    with create_trial(folder) as trial:
        table = (folder / "sites.toml").read_text()
        sections = table.split("\n\n")
        (folder / "sites.toml").write_text("\n\n".join(part for part in sections if "[site-3]" not in part))
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run(settings)
        wait_until(trial, lambda: len(RunFolder(folder / "run").read_lines("attendance.jsonl")) >= 1)
        request_pause(folder / "run", at_cycle_end=True)
        wait_for_end(trial)
        outcome = trial.read_run_outcome()
        done = summarize_run(folder / "run")["done"]
        assert not outcome.completed
        assert outcome.reason.startswith(f"paused by the operator after {done} of 12 rounds"), outcome.reason
        (folder / "sites.toml").write_text(table)
        trial.start_run(f"{settings} resume=true")
        wait_for_end(trial)
        outcome = trial.read_run_outcome()
    assert outcome.completed, outcome.reason
    summary = summarize_run(folder / "run")
    assert summary["attendance"]["site-3"] == {"answered": 4 - done // 3, "absent": 0, "refused": 0}
    recipe = Recipe.of("cycp-fedavg", engine="loop", cycles=4)
    training, _, state = assemble_sites(folder, recipe, ["site-0", "site-1", "site-2"])[0]
    before = next(finished for finished in training.rounds(state) if finished.phase.round == done - 1)
    *_, last = assemble_sites(folder, recipe, list(SITES))[0].training.rounds(before.state)
    np.testing.assert_allclose(read_trained_weights(folder / "run"), extract_weights(recipe, last), rtol=0, atol=1e-6)


def test_an_answer_after_its_round_is_merged_as_in_a_simulation_with_that_attendance(tmp_path: Path) -> None:
    """A site's worker is stopped until its round has ended without it, and then goes on with the same message."""
    folder = tmp_path / "trial"
    options = "participation=full stages=constant"
    settings = f'cycles=8 deadline=10.0 late-answers="merge" method="cycp-fedavg" evaluation="none" options="{options}"'
    with create_trial(folder) as trial:
        app = folder / "pyproject.toml"
        app.write_text(f'{app.read_text()}\nlate-answers = "drop"\n')
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run(settings)
        lines = RunFolder(folder / "run")
        wait_until(trial, lambda: len(lines.read_lines("attendance.jsonl")) >= 1)
        worker = find_worker(trial, "site-1")
        os.kill(worker, signal.SIGSTOP)
        wait_until(trial, lambda: any("site-1" in line["absent"] for line in lines.read_lines("attendance.jsonl")))
        os.kill(worker, signal.SIGCONT)
        wait_for_end(trial)
        outcome = trial.read_run_outcome()
    assert outcome.completed, outcome.reason
    assert summarize_run(folder / "run")["attendance"]["site-1"]["late"] >= 1
    recipe = Recipe.of("cycp-fedavg", engine="loop", cycles=8, participation="full", stages="constant")
    *_, last = replay_assembly(*assemble_sites(folder, recipe, list(SITES)), read_trace(folder / "run", list(SITES)))
    np.testing.assert_allclose(read_trained_weights(folder / "run"), extract_weights(recipe, last), rtol=0, atol=1e-6)
