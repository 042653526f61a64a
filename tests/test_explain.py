"""A plan explained: each number is what the search gives for the changed question."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopipe
from autopipe.core.cluster import Link
from autopipe.core.plan import SAME_CUTS, Rejected
from autopipe.core.units import format_duration
from autopipe.explain import explanation, variations
from tests.synthetic import GIB, chain, cluster

SLOW = Link(1e-3, 1e8)
MODEL = chain(
    [0.01] * 12, micro_batches=(1, 2), held_bytes=1_000_000, output_elements=1_000_000, parameter_bytes=1_000_000
)
TWO = cluster(2, memory_bytes=GIB, link=SLOW)


def planned(**options):
    return autopipe.plan(MODEL, TWO, global_batch=16, headroom=0.0, **options)


def by_name(plan, of=TWO):
    return {variation.what: variation.plan for variation in variations(plan, MODEL, of)}


def test_the_plan_s_own_question_gives_the_plan():
    plan = planned()
    again = by_name(plan)["nothing else asked for"]
    assert (again.stages, again.schedule, again.predicted) == (plan.stages, plan.schedule, plan.predicted)


@pytest.mark.parametrize(
    ("what", "changed", "batch"),
    [
        ("one more device (3)", cluster(3, memory_bytes=GIB, link=SLOW), 16),
        ("twice the bandwidth", cluster(2, memory_bytes=GIB, link=Link(1e-3, 2e8)), 16),
        ("twice the memory (2.00 GiB usable)", cluster(2, memory_bytes=2 * GIB, link=SLOW), 16),
        ("a global batch of 32", TWO, 32),
        ("a global batch of 8", TWO, 8),
    ],
)
def test_each_change_is_searched(what, changed, batch):
    expected = autopipe.plan(MODEL, changed, global_batch=batch, headroom=0.0)
    found = by_name(planned())[what]
    assert (found.predicted, found.stages) == (expected.predicted, expected.stages)


def test_a_device_that_the_cluster_has_is_the_next_one():
    uneven = cluster(3, memory_bytes=GIB, link=SLOW, speeds=(1.0, 1.0, 0.25))
    plan = autopipe.plan(MODEL, uneven, global_batch=16, devices=2, headroom=0.0)
    expected = autopipe.plan(MODEL, uneven, global_batch=16, headroom=0.0)
    assert by_name(plan, uneven)["one more device (3)"].predicted == expected.predicted


def test_the_limits_are_those_of_the_plan_headroom_and_all():
    plan = autopipe.plan(MODEL, TWO, global_batch=16, memory_bytes=200_000_000, headroom=0.1)
    again = by_name(plan)
    assert again["nothing else asked for"].predicted == plan.predicted
    assert again["nothing else asked for"].memory_limit_bytes == plan.memory_limit_bytes == (180_000_000,) * plan.depth


def test_the_paragraph_holds_the_numbers():
    plan = planned()
    text = explanation(plan, MODEL, TWO)
    assert text.startswith(f"The step of {format_duration(plan.predicted.step_s)} is limited by {plan.limited_by};")
    third = by_name(plan)["one more device (3)"]
    assert f"With one more device (3) a step takes {format_duration(third.predicted.step_s)} (" in text
    assert "\n" not in text


def test_nothing_changes_is_said_as_such():
    assert "With twice the memory (2.00 GiB usable) nothing would change." in explanation(planned(), MODEL, TWO)


def test_a_plan_under_options_says_what_it_would_be_without():
    plan = planned(pins={"layers.1": 1})
    text = explanation(plan, MODEL, TWO)
    assert f"It was made under options that keep it from {format_duration(planned().predicted.step_s)} a step" in text


def test_changes_are_compared_with_the_plan_without_options():
    text = explanation(planned(pins={"layers.1": 1}), MODEL, TWO)
    assert "without them, and compared with that" in text
    assert "With twice the memory (2.00 GiB usable) nothing would change." in text


def test_a_plan_without_a_pipeline_is_named_as_that():
    text = explanation(planned(devices=1), MODEL, TWO)
    assert "; no pipeline, micro-batch " in text
    assert "1 stage" not in text


def test_a_batch_that_no_measured_size_divides_is_no_plan():
    even = chain([0.01] * 4, micro_batches=(2,))
    plan = autopipe.plan(even, TWO, global_batch=2)
    assert "With a global batch of 1 no plan is possible." in explanation(plan, even, TWO)


def test_what_the_noise_leaves_open():
    plan = replace(planned(), noise=0.05)
    step_s = plan.predicted.step_s
    close = replace(
        plan,
        rejected=(
            Rejected("near", "+4.0 %", 1.04 * step_s, 0.1, 1),
            Rejected("far", "+6.0 %", 1.06 * step_s, 0.1, 1),
            Rejected("large", "over the 1 GiB limit on rank 0", step_s, 0.1, 1),
            Rejected("never", "cannot run: no"),
        ),
    )
    assert "Within the profile's noise of 5.0 %, only measuring tells this plan from: near." in explanation(
        close, MODEL, TWO
    )
    same = replace(close, rejected=(Rejected("equal layers, 1F1B", SAME_CUTS, step_s, 0.1, 1),))
    assert "None of the rejected plans is within the profile's noise of 5.0 %." in explanation(same, MODEL, TWO)
    computed = explanation(close, replace(MODEL, origin="analytic"), TWO)
    assert computed.endswith("The costs are analytic, not measured: by how much they vary is not known.")
    assert "None of the rejected plans is within the profile's noise of 0.0 %." in explanation(
        replace(close, noise=0.0, rejected=close.rejected[:2]), MODEL, TWO
    )
