"""The suite of an algorithm: its methods by hand, then whole runs on a small federation."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.interfaces import Algorithm, Batch, Cohort, Model, Upload
from fedauc.stages import Geometric
from fedauc.testing._client_visits import (
    EVERYONE,
    LinearNetwork,
    average_uploads,
    draw_batches,
    embedding_width,
    make_phase,
    make_setting,
    server_after_scoring,
    stack_download,
    start_model,
    visit_client,
    visit_one_by_one,
)
from fedauc.testing._expectations import (
    all_finite,
    check_configuration,
    expect,
    expect_close,
    expect_same_shapes,
    same_bits,
)
from fedauc.testing._runs import check_determinism, check_isolation, check_precision, check_resume, check_rounds
from fedauc.testing.small_federation import small_recipe
from fedauc.trees import Tree, is_empty, tree_at, tree_leaves, tree_map, tree_stack

TWO_STAGES: dict[str, Any] = {"cycles": 3, "stages": Geometric(initial=1, decay=0.5, scale=2.0)}
"""A stage of one cycle and a stage of two."""


def check_algorithm(algorithm: Algorithm) -> None:
    """Check an algorithm as an engine, a checkpoint and a federation need it; a failure is an AssertionError.

    Its configuration is frozen and survives JSON. Its client methods are pure, take any leading dimensions and can be
    traced. Uploads have the shape of what is shared. Rounds that nobody comes to are survived. Runs repeat to the bit
    with the same seed, on the loop and on the batched engine, and go on to the bit from any round.

    >>> from fedauc.algorithms.fedavg import FedAvg
    >>> check_algorithm(FedAvg(weight_decay=0.01))
    """
    check_configuration(algorithm, Algorithm)
    check_client_methods(algorithm)
    check_arguments_unchanged(algorithm)
    check_model_replacement(algorithm)
    check_empty_round(algorithm)
    check_server_settings(algorithm)
    for stacked in (False, True):
        check_tracing(algorithm, stacked)
    for engine in ("loop", "batched"):
        settings = {"algorithm": algorithm, "engine": engine, **TWO_STAGES}
        recipe = small_recipe("cycp-fedavg", **settings)
        check_rounds(recipe)
        check_determinism(recipe)
        check_resume(small_recipe("cycp-fedavg", stage_output="round_mean", **settings))
        for dtype in (torch.float32, torch.bfloat16):
            check_precision(recipe, dtype)
    if not algorithm.objective.takes_embeddings:
        check_isolation(small_recipe("cycp-fedavg", algorithm=algorithm))


def check_client_methods(algorithm: Algorithm) -> None:
    """The client methods give a stacked cohort what they give each client, over five rounds; uploads fit the server."""
    setting = make_setting()
    server = algorithm.init(setting, start_model(algorithm))
    client_states: list[Tree] = [(), (), ()]
    # A first visit, and four with a client state, of the same period and of an earlier one.
    for number in range(5):
        phase, cohort = make_phase(algorithm, number), EVERYONE._replace(round=number)
        download = algorithm.dispatch(setting, server, cohort, phase)
        batches = draw_batches(number, download.per_client)
        alone = visit_one_by_one(algorithm, download, client_states, batches)
        repeated = visit_one_by_one(algorithm, download, client_states, batches)
        expect(same_bits(tuple(alone), tuple(repeated)), "the same visit a second time gives other numbers")
        stacked_states = () if is_empty(client_states[0]) else tree_stack(client_states)
        stacked = visit_client(algorithm, stack_download(download), stacked_states, batches)
        expect_close(stacked, tree_stack(alone), "a stack of clients does not give what each client gives alone")
        expect(bool((stacked.loss >= 0).all()), "monitored_loss is negative")
        if phase.scoring:
            expect(is_empty(alone[0].upload.mean), "upload.mean must be () in a scoring round")
        else:
            shapes = "upload.mean must have the shape of download.shared"
            expect_same_shapes(alone[0].upload.mean, download.shared, shapes)
            expect(type(alone[0].upload.mean) is type(download.shared), f"{shapes}, and its type")
        client_states = [visited.client_state for visited in alone]
        upload = average_uploads([visited.upload for visited in alone], cohort)
        server = algorithm.merge(setting, server, upload, cohort, phase)
    learned = algorithm.extract_model(server.shared).weights
    expect(not torch.equal(learned, start_model(algorithm).weights), "five rounds have not changed the model")


def check_tracing(algorithm: Algorithm, stacked: bool) -> None:
    """`step` can be traced, for one client or a stack of them, and the trace gives its numbers."""
    setting, network, server = (
        make_setting(),
        LinearNetwork(embedding_width(algorithm)),
        server_after_scoring(algorithm),
    )
    download = algorithm.dispatch(setting, server, EVERYONE, make_phase(algorithm, 2))
    batches = draw_batches(1, download.per_client)
    if stacked:
        download = stack_download(download)
    else:
        batches = [tree_at(batch, 0) for batch in batches]
        download = download._replace(per_client=tree_at(download.per_client, 0))

    def take_step(shared: Tree, anchor: Tree, local: Tree, batch: Batch) -> Tree:
        return algorithm.step(network, download._replace(shared=shared, anchor=anchor), local, batch)

    local = algorithm.begin(download, algorithm.initial_client_state(download))
    # Tracing knows inputs by identity, and at the start several zeros are one tensor: give each its own.
    example = tree_map(torch.clone, (download.shared, download.anchor, local, batches[0]))
    traced = make_fx(take_step)(*example)
    # Two steps on: a trace that had baked its first inputs in would not follow.
    for batch in batches:
        result = traced(download.shared, download.anchor, local, batch)
        expected = take_step(download.shared, download.anchor, local, batch)
        expect_close(result, expected, "the trace of step gives other numbers; step must not depend on values of data")
        local = expected[0]


def check_arguments_unchanged(algorithm: Algorithm) -> None:
    """No method changes a tensor that it is given."""
    setting = make_setting()
    server = algorithm.init(setting, start_model(algorithm))
    client_state: Tree = ()
    for number in range(4):
        phase, cohort = make_phase(algorithm, number), Cohort(number, (0,), (1.0,))
        arguments = (server.shared, server.anchor, server.private, client_state)
        arguments_before = tree_map(torch.clone, arguments)
        download = algorithm.dispatch(setting, server, cohort, phase)
        batches = [tree_at(batch, 0) for batch in draw_batches(number, download.per_client)]
        visited = visit_client(
            algorithm, download._replace(per_client=tree_at(download.per_client, 0)), client_state, batches
        )
        upload = average_uploads([visited.upload], cohort)
        sent = tree_map(torch.clone, upload)
        merged = algorithm.merge(setting, server, upload, cohort, phase)
        expect(
            same_bits(arguments_before, arguments),
            "a method has changed the server's state or the client's state in place",
        )
        expect(same_bits(sent, upload), "merge has changed the upload in place")
        server, client_state = merged, visited.client_state


def check_model_replacement(algorithm: Algorithm) -> None:
    """Wrappers and server optimizers change the model, and nothing else that travels or is remembered."""
    setting, model, phase = make_setting(), start_model(algorithm), make_phase(algorithm, 0)
    server = algorithm.init(setting, model)
    download = algorithm.dispatch(setting, server, Cohort(0, (0,), (1.0,)), phase)
    local = algorithm.begin(download, algorithm.initial_client_state(download))
    replacement = Model(model.weights + 1, model.buffers + 1)
    expect(same_bits(algorithm.local_model(local), model), "local_model does not give the model that begin was sent")
    for name, tree, replace_in, read in (
        ("replace_model", server.shared, algorithm.replace_model, algorithm.extract_model),
        ("replace_local_model", local, algorithm.replace_local_model, algorithm.local_model),
    ):
        changed = replace_in(tree, replacement)
        expect(type(changed) is type(tree), f"{name} returns another type than it was given")
        expect(read(changed) == replacement, f"{name} does not put in the model that it was given")
        expect(same_bits(replace_in(changed, model), tree), f"{name} changes more than the model")
        count = sum(not torch.equal(*pair) for pair in zip(*map(tree_leaves, (changed, tree)), strict=True))
        expect(count == 2, f"{name} changes {count} tensors; it must change weights and buffers alone")


def check_empty_round(algorithm: Algorithm) -> None:
    """A round that nobody comes to leaves a server of the same shape, whose learning can go on."""
    setting, server = make_setting(), server_after_scoring(algorithm)
    for number in (2, 3):
        phase = make_phase(algorithm, number)
        merged = algorithm.merge(setting, server, Upload(), Cohort(number, (), ()), phase)
        sentence = "merge changes the shape of the server in a round that nobody comes to"
        expect_same_shapes((merged.shared, merged.private), (server.shared, server.private), sentence)
        expect(all_finite(merged.shared), "merge makes numbers that are not finite in a round that nobody comes to")
        server = merged
    algorithm.dispatch(setting, server, EVERYONE, make_phase(algorithm, 4))


def check_server_settings(algorithm: Algorithm) -> None:
    """`without_server_settings` changes nothing at the clients, and changes nothing when it is applied twice."""
    reduced, setting = algorithm.without_server_settings(), make_setting()
    expect(reduced.without_server_settings() == reduced, "without_server_settings applied twice differs from once")
    phase = make_phase(algorithm, 2)
    download = algorithm.dispatch(setting, server_after_scoring(algorithm), EVERYONE, phase)
    batches = draw_batches(2, download.per_client)
    first, second = (visit_one_by_one(kind, download, [(), (), ()], batches) for kind in (algorithm, reduced))
    expect(same_bits(tuple(first), tuple(second)), "without_server_settings changes what clients compute")
