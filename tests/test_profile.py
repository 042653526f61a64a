from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.errors import UsageError
from autopipe.core.profile import CostTable, Edge, Layer, Profile, Tie, content_digest
from autopipe.core.stage import shared_ties, stage_cost, tied_optimizer_s
from tests.samples import MIB, profile


def test_an_edge_grows_with_the_micro_batch():
    edge = Edge("x", 0, (1,), ("b", "128*b", 7), "bfloat16")
    assert edge.sizes(3) == (3, 384, 7)
    assert edge.bytes(3) == 3 * 384 * 7 * 2


@pytest.mark.parametrize("dimension", ["", "n", "*b", "2*", "2*c", "b*2", "-2*b", "2.5*b", -1])
def test_a_dimension_that_means_nothing_is_refused(dimension):
    with pytest.raises(UsageError, match="is not a dimension"):
        Edge("x", 0, (1,), (dimension,), "float32")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UsageError, match=r"dtype 'float3' is not known: use one of float64"):
        Edge("x", 0, (1,), (1,), "float3")


def test_costs_are_found_by_micro_batch():
    made = profile()
    assert made.micro_batches == (1, 2)
    assert made.at(2)[1].forward_s == pytest.approx(2 * made.at(1)[1].forward_s)
    with pytest.raises(UsageError, match=r"micro-batch 4 was not profiled, only 1, 2"):
        made.at(4)


def test_a_tied_parameter_is_counted_once():
    made = profile()
    assert made.parameters == (2 + 4 * 3) * MIB // 4
    assert replace(made, ties=()).parameters == (2 + 4 * 3 + 2) * MIB // 4


def test_what_crosses_a_cut_includes_what_is_relayed():
    layers = tuple(Layer(f"l{i}", 0, 0) for i in range(4))
    edges = (
        Edge("input", None, (0, 3), ("b",), "float32"),
        Edge("chain", 0, (1,), ("b",), "float32"),
        Edge("skip", 0, (3,), ("b",), "float32"),
    )
    made = Profile("m", layers, edges, (), "cpu", "float32")
    names = [[edge.name for edge in made.crossing(cut)] for cut in range(4)]
    assert names == [[], ["chain", "skip"], ["skip"], ["skip"]]


def test_a_layer_may_forbid_the_cut_after_it():
    layers = tuple(Layer(f"l{i}", 0, 0, cut_after=i != 1) for i in range(4))
    assert Profile("m", layers, (), (), "cpu", "float32").legal_cuts() == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "no layers"),
        ({"costs": (CostTable(1, ()),)}, "6 layers, but costs for 0 at micro-batch 1"),
        ({"ties": (Tie("w", (0, 6), 4),)}, "layer 6 named, there are 6"),
        ({"edges": (Edge("x", 6, (1,), (1,), "float32"),)}, "layer 6 named"),
        ({"edges": (Edge("x", 0, (-1,), (1,), "float32"),)}, "layer -1 named"),
        ({"optimizer": "lion"}, "optimizer 'lion' is not known: use one of sgd"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        replace(profile(), **change)


def test_the_digest_follows_the_content():
    assert profile().digest == profile().digest
    assert replace(profile(), noise=0.1).digest != profile().digest
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})


@given(st.integers(min_value=1, max_value=5), st.sampled_from([1, 2]))
def test_two_stages_cost_what_one_does_but_for_the_boundary(cut, micro_batch):
    made = profile()
    whole = stage_cost(made, 0, 6, micro_batch)
    first, second = stage_cost(made, 0, cut, micro_batch), stage_cost(made, cut, 6, micro_batch)
    for name in ("forward_s", "backward_s", "held_after_forward_bytes"):
        assert getattr(first, name) + getattr(second, name) == pytest.approx(getattr(whole, name))
    twice = tied_optimizer_s(made.at(micro_batch), made, made.ties[0])  # the tied parameter's, on both
    assert twice > 0
    assert first.optimizer_s + second.optimizer_s == pytest.approx(whole.optimizer_s + twice)
    assert first.parameter_bytes + second.parameter_bytes == whole.parameter_bytes + 2 * MIB  # tied: on both
    assert first.send_bytes == second.receive_bytes == made.edges[cut].bytes(micro_batch)
    assert first.receive_grad_bytes == second.send_grad_bytes == first.send_bytes
    assert (whole.receive_bytes, whole.send_bytes) == (0, 0)


def test_a_rank_holds_a_tied_parameter_once():
    """In a V the first and the last stage are on one rank; the last one's backward makes the gradient."""
    made, bounds = profile(), [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert [shared_ties(made, bounds, (0, 1, 1, 0), stage) for stage in range(4)] == [made.ties, (), (), ()]
    assert not any(shared_ties(made, bounds, (0, 1, 2, 3), stage) for stage in range(4))
    alone, once = stage_cost(made, 0, 1, 2), stage_cost(made, 0, 1, 2, shared=made.ties)
    assert alone.static_bytes - once.static_bytes == 4 * 2 * MIB  # weight, gradient, and the two of AdamW
    assert (once.parameter_bytes, once.shared_bytes, once.gradient_bytes) == (2 * MIB, 2 * MIB, 0)
    assert alone.optimizer_s - once.optimizer_s == pytest.approx(tied_optimizer_s(made.at(2), made, made.ties[0]))


def test_a_frozen_tied_parameter_has_no_gradient():
    made = profile()
    layers = tuple(replace(layer, trainable_bytes=0) if n in (0, 5) else layer for n, layer in enumerate(made.layers))
    made = replace(made, layers=layers, ties=(replace(made.ties[0], trained=False),))
    whole = stage_cost(made, 0, 6, 2)
    assert whole.parameter_bytes == (2 + 4 * 3) * MIB
    assert whole.gradient_bytes == 4 * 3 * MIB


def test_a_recomputed_layer_keeps_its_input_and_runs_its_forward_twice():
    made = profile()
    kept, again = stage_cost(made, 1, 2, 2), stage_cost(made, 1, 2, 2, recompute={1})
    assert again.backward_s == pytest.approx(kept.backward_s + kept.forward_s)
    assert again.held_after_forward_bytes == made.edges[1].bytes(2) < kept.held_after_forward_bytes
    assert again.workspace_bytes == kept.workspace_bytes + kept.held_after_forward_bytes


def test_optimizer_and_speed_scale_the_stage():
    made = profile()
    adam, sgd, twice = (
        stage_cost(made, 1, 3, 1, optimizer="adamw"),
        stage_cost(made, 1, 3, 1, optimizer="sgd"),
        stage_cost(made, 1, 3, 1, speed=2.0),
    )
    assert (adam.optimizer_bytes, sgd.optimizer_bytes) == (2 * adam.gradient_bytes, 0)
    assert twice.forward_s == pytest.approx(adam.forward_s / 2)
    assert {k: v for k, v in asdict(twice).items() if k.endswith("bytes")} == {
        k: v for k, v in asdict(adam).items() if k.endswith("bytes")
    }
