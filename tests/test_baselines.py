from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.baselines import BASELINES
from autopipe.baselines.equal_layers import equal_layers
from autopipe.baselines.equal_parameters import equal_parameters
from autopipe.baselines.gpipe import gpipe
from autopipe.baselines.megatron import megatron
from autopipe.baselines.pipedream import pipedream
from autopipe.baselines.torchtitan import torchtitan
from autopipe.core.profile import Profile
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
    for name, rule in BASELINES.items():
        cuts = rule(profile, depth)
        if cuts is None:
            assert depth - 1 > len(profile.legal_cuts()) or name in ("torchtitan's split", "Megatron's split")
        else:
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


def transformer(blocks: int, **options: object) -> Profile:
    names = ["wte", "wpe", *(f"h.{i}" for i in range(blocks)), "ln_f", "lm_head"]
    return chain([1.0] * len(names), names=names, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocks", "depth", "titan", "even"),
    [
        (6, 4, (3, 5, 7), (3, 5, 7)),  # 8 units: E and 1 block, 2, 2, 1 and L
        (8, 4, (4, 7, 9), None),  # 10 units: 3, 3, 2, 2
        (2, 4, (2, 3, 4), (2, 3, 4)),  # each unit alone
        (2, 5, None, None),
    ],
)
def test_embeddings_and_head_count_as_a_block(
    blocks: int, depth: int, titan: tuple[int, ...] | None, even: tuple[int, ...] | None
) -> None:
    assert torchtitan(transformer(blocks), depth) == titan
    assert megatron(transformer(blocks), depth) == even


def test_rules_for_transformers_know_no_other_models() -> None:
    assert torchtitan(chain([1.0] * 4, names=["a", "b", "c", "d"]), 2) is None
    assert megatron(chain([1.0] * 4, names=["a.0", "b", "c.0", "d"]), 2) is None
    assert torchtitan(chain([1.0] * 4), 2) == (2,)
    assert torchtitan(transformer(6, legal=[True] * 2 + [False] + [True] * 7), 4) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=7), st.integers(1, 4))
def test_gpipe_and_pipedream_are_exact(layers: list[tuple[int, bool]], depth: int) -> None:
    forward = [float(f) for f, _ in layers]
    profile = chain(forward, legal=[legal for _, legal in layers])
    ends = (0, *profile.legal_cuts(), len(layers))
    if depth >= len(ends):
        assert gpipe(profile, depth) is pipedream(profile, depth) is None
        return

    def stages(bounds: Sequence[int]) -> list[float]:
        return [sum(forward[a:b]) for a, b in pairwise(bounds)]

    everything = [stages([ends[p] for p in split]) for split in splits(len(ends) - 1, depth)]
    spread, longest = gpipe(profile, depth), pipedream(profile, depth)
    assert spread is not None
    assert longest is not None
    found = stages((0, *spread, len(layers)))
    assert pvariance(found) == pytest.approx(min(map(pvariance, everything)))
    assert max(stages((0, *longest, len(layers)))) == min(map(max, everything))
