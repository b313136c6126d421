"""The suite of an upload transform: one client, a stack of clients, the server, and small runs."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.interfaces import BatchSize, Cohort, Phase, ServerRound, Upload, UploadTransform
from fedauc.random_tensors import KeyedNoise, client_keys
from fedauc.testing._expectations import check_configuration, expect, expect_close, same_bits, untouched_generators
from fedauc.testing._runs import check_determinism, check_resume, check_rounds
from fedauc.testing._uploads import list_layouts, make_upload
from fedauc.testing.small_federation import small_recipe
from fedauc.transforms._summing import SummingTransform
from fedauc.trees import is_empty, tree_stack

CLIENTS = 3


def check_transform(transform: UploadTransform) -> None:
    """Check a transform by hand, then in runs of two methods on the loop and the batched engine."""
    check_configuration(transform, UploadTransform)
    with untouched_generators(f"the transform {transform.name!r}"):
        check_client_side(transform)
        check_server_side(transform)
    # Private runs share no raw scores.
    pool = "histogram" if transform.needs_fixed_denominator else "cycle"
    methods: dict[str, dict[str, str]] = {"cycp-minimax": {}, "cycp-pairwise": {"pool": pool}}
    for method, settings in methods.items():
        for engine in ("loop", "batched"):
            recipe = small_recipe(method, engine=engine, transforms=(transform,), **settings)
            check_rounds(recipe)
            check_determinism(recipe)
            check_resume(recipe)


def check_client_side(transform: UploadTransform) -> None:
    """`client` and `decode` are pure, accept a stack of clients, and can be traced."""
    name, uploads = transform.name, [make_upload(client) for client in range(CLIENTS)]
    shared, keys = uploads[0].mean, torch.from_numpy(client_keys(range(CLIENTS), 0, "check"))
    states = [transform.initial_state(shared) for _ in uploads]
    alone = [transform.client(upload, state, key) for upload, state, key in zip(uploads, states, keys, strict=True)]
    stacked = transform.client(tree_stack(uploads), tree_stack(states), keys)
    expect_close(stacked, tree_stack(alone), f"{name}: a stack of clients must give what each client gives alone", 1e-9)
    again = transform.client(uploads[0], states[0], keys[0])
    expect(same_bits(again, alone[0]), f"{name}: the same upload, state and key must give the same result")
    expect(same_bits(uploads[0], make_upload(0)), f"{name}: the transform must not change the upload that it is given")
    sent, state = alone[0]
    expect(list_layouts(state) == list_layouts(states[0]), f"{name}: the client's state must keep its types and shapes")
    if not transform.encodes:
        same = list_layouts(sent) == list_layouts(uploads[0]._replace(mean=transform.zero_mean(uploads[0].mean)))
        expect(same, f"{name} sends other types or shapes than it is given: set `encodes = True` and write `decode`")
    decoded = [transform.decode(sent, shared) for sent, _ in alone]
    expected = uploads[0]._replace(mean=transform.zero_mean(uploads[0].mean))
    restored = list_layouts(decoded[0]) == list_layouts(expected)
    expect(restored, f"{name}: decode must restore the types and shapes of the upload")
    expect_close(
        transform.decode(stacked[0], shared), tree_stack(decoded), f"{name}: decode must accept a stack of clients"
    )
    scoring, _ = transform.client(Upload(mean=(), pool=uploads[0].pool), states[0], keys[0])
    expect(is_empty(scoring.mean), f"{name}: a scoring round has no mean; return `()` as it is")
    # A tracer raises where the result depends on values of tensors.
    if not isinstance(transform, SummingTransform):
        make_fx(lambda upload, state, key: transform.client(upload, state, key))(uploads[0], states[0], keys[0])


def check_server_side(transform: UploadTransform) -> None:
    """`server` is pure and keeps the types and shapes of the mean."""
    mean, cohort = make_upload(0).mean, Cohort(0, (0, 1), (0.5, 0.5))
    server_round = ServerRound(cohort, Phase(0, 0, 0, 0.1, 4, BatchSize(2, 2)), KeyedNoise(0, "check"), mean)
    start, sent = transform.initial_server_state(mean), transform.zero_mean(mean)
    result, state = transform.server(sent, start, server_round)
    same = list_layouts(result) == list_layouts(mean)
    expect(same, f"{transform.name}: server must keep the types and shapes of the mean")
    same = list_layouts(state) == list_layouts(start)
    expect(same, f"{transform.name}: the server's state must keep its types and shapes")
    again, _ = transform.server(sent, start, server_round)
    expect(same_bits(result, again), f"{transform.name}: server must give the same result for the same mean and key")
