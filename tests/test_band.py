"""Where a plan from computed costs could be another if the device is faster or slower than they say."""

from __future__ import annotations

from dataclasses import replace

from autopipe import plan
from autopipe.core.cluster import Link
from tests.synthetic import chain, cluster


def test_a_faster_device_makes_the_links_too_slow() -> None:
    """Two stages save a little of the one device's time; if all computing took half as long, the links would not."""
    profile = replace(chain([1.0] * 4), band=0.5)
    made = plan(profile, cluster(2, link=Link(6.0, 1e18)), global_batch=4, replicas=[1])
    assert made.depth == 2
    flips = [note for note in made.notes if note.startswith("the choice flips")]
    assert len(flips) == 1
    assert flips[0].startswith("the choice flips inside the band: 50.0 % faster, ")
    assert ", 1 stage, micro-batches of 1 would save" in flips[0]


def test_without_links_the_choice_stays() -> None:
    made = plan(replace(chain([1.0] * 4), band=0.5), cluster(2), global_batch=4, replicas=[1])
    assert "the choice stays the same if the device computes that much faster or slower" in made.notes
