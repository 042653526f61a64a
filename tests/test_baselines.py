from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.baselines import BASELINES
from autopipe.baselines.equal_layers import equal_layers
from autopipe.baselines.equal_parameters import equal_parameters
from autopipe.solvers.brute import splits
from tests.synthetic import chain


@pytest.mark.parametrize(
    ("layers", "depth", "cuts"), [(8, 4, (2, 4, 6)), (10, 4, (2, 5, 7)), (3, 3, (1, 2)), (5, 1, ())]
)
def test_equal_layers(layers: int, depth: int, cuts: tuple[int, ...]) -> None:
    assert equal_layers(chain([1.0] * layers), depth) == cuts


def test_equal_layers_moves_to_the_nearest_legal_cut() -> None:
    profile = chain([1.0] * 8, legal=[True, False, False, False, True, True, False, True])
    assert profile.legal_cuts() == (1, 5, 6)
    assert equal_layers(profile, 2) == (5,)
    assert equal_layers(profile, 4) == (1, 5, 6)


def test_equal_parameters_makes_the_largest_stage_smallest() -> None:
    assert equal_parameters(chain([1.0] * 5, parameter_bytes=[400, 4, 4, 4, 400]), 3) in {(1, 4), (1, 2), (1, 3)}
    assert equal_parameters(chain([1.0] * 4, parameter_bytes=[40, 40, 40, 120]), 2) == (3,)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=7), st.integers(1, 7))
def test_every_baseline_gives_legal_cuts_or_none(layers: list[tuple[int, bool]], depth: int) -> None:
    sizes = [4 * size for size, _ in layers]
    profile = chain([1.0] * len(layers), parameter_bytes=sizes, legal=[legal for _, legal in layers])
    for rule in BASELINES.values():
        cuts = rule(profile, depth)
        if depth - 1 > len(profile.legal_cuts()):
            assert cuts is None
        else:
            assert cuts is not None
            assert len(cuts) == depth - 1
            assert set(cuts) <= set(profile.legal_cuts())
            assert list(cuts) == sorted(set(cuts))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.integers(1, 4))
def test_equal_parameters_is_exact(sizes: list[int], depth: int) -> None:
    if depth > len(sizes):
        return
    cuts = equal_parameters(chain([1.0] * len(sizes), parameter_bytes=[4 * s for s in sizes]), depth)
    assert cuts is not None

    def largest(ends: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise(ends))

    assert largest((0, *cuts, len(sizes))) == min(map(largest, splits(len(sizes), depth)))
