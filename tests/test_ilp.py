from __future__ import annotations

import subprocess
import sys
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.solvers import device_dp, ilp
from autopipe.solvers.brute import splits
from autopipe.solvers.chain_dp import Floats
from autopipe.solvers.device_dp import Option
from autopipe.solvers.ilp import Certificate, Column, Side
from tests.test_device_dp import cases

pytest.importorskip("highspy")

Case = tuple[list[Option], tuple[int, ...], Floats | None]


def agree(found: Certificate, expected: device_dp.Assigned | None) -> None:
    assert (found.assigned is None) == (expected is None)
    if found.assigned and expected:
        assert found.assigned.value == pytest.approx(expected.value, rel=1e-5, abs=1e-5)
        assert found.lower_bound == pytest.approx(expected.value, rel=1e-5, abs=1e-5)


@given(cases(), st.integers(0, 30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_agrees_with_the_dynamic_program(case: Case, repeats: int, cut: bool) -> None:
    options, available, _ = case
    expected = device_dp.smallest_step(options, available, repeats)
    cutoff = expected.value if cut and expected else np.inf
    agree(ilp.smallest_step(options, available, repeats, cutoff=cutoff), expected)
    highest = device_dp.smallest_maximum(options, available)
    agree(ilp.smallest_maximum(options, available, cutoff=highest.value if cut and highest else np.inf), highest)


@given(cases(), st.integers(0, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_side_constraints_are_brute_force(case: Case, repeats: int, seed: int) -> None:
    """Columns that are not allowed, and a limit on a sum over all of them."""
    options, available, _ = case
    stages, width, _ = options[0].work.shape
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 5, (stages, len(options), width, width))
    banned = rng.random(weights.shape) < 0.2
    most = int(rng.integers(0, 5 * stages))

    best = np.inf
    for chosen in product(range(len(options)), repeat=stages):
        used = [sum(options[o].count for o in chosen if options[o].device == c) for c in range(len(available))]
        if any(a > b for a, b in zip(used, available, strict=True)):
            continue
        for positions in splits(width - 1, stages):
            columns = [Column(s, o, *ab) for s, (o, ab) in enumerate(zip(chosen, pairwise(positions), strict=True))]
            if sum(weights[c] for c in columns) <= most and not any(banned[c] for c in columns):
                work = [float(options[c.option].work[c.stage, c.start, c.stop]) for c in columns]
                others = ((options[c.option].other, c) for c in columns)
                other = [0.0 if table is None else float(table[c.stage, c.start, c.stop]) for table, c in others]
                if max(work) < np.inf:
                    best = min(best, sum(work) + sum(other) + repeats * max(work))
    found = ilp.smallest_step(
        options,
        available,
        repeats,
        allowed=lambda column: not banned[column],
        sides=[Side(lambda column: float(weights[column]), most=most)],
    )
    if best == np.inf:
        assert found == Certificate(None, np.inf)
    else:
        assert found.assigned is not None
        assert found.assigned.value == pytest.approx(best, rel=1e-5, abs=1e-5)
        assert found.proved or best == 0


def layers(works: list[float], stages: int) -> Floats:
    sums = np.concatenate([[0], np.cumsum(works)])
    table = np.where(np.triu(np.ones((len(sums), len(sums))), 1) > 0, sums[None, :] - sums[:, None], np.inf)
    return np.stack([table] * stages)


def test_a_cutoff_below_the_best_is_the_bound() -> None:
    option = Option(0, layers([1.0, 1.0, 1.0, 3.0], 2))
    assert ilp.smallest_maximum([option], [2], cutoff=2.5) == Certificate(None, 2.5)
    found = ilp.smallest_maximum([option], [2], cutoff=3.0)
    assert found.assigned == device_dp.Assigned((0, 3, 4), (0, 0), 3.0)
    assert found.proved


def test_layers_on_the_same_class_wherever_they_are() -> None:
    """A side constraint that no table can say: the first and the last stage on equal devices, of which one is slow."""
    work = layers([2.0] * 6, 3)
    options = [Option(0, work), Option(1, work * 3)]
    free = ilp.smallest_maximum(options, [2, 1])
    ends = Side(lambda column: {0: 1.0, 2: -1.0}.get(column.stage, 0.0) * column.option, least=0, most=0)
    tied = ilp.smallest_maximum(options, [2, 1], sides=[ends])
    assert free.assigned is not None
    assert tied.assigned is not None
    assert (free.assigned.value, tied.assigned.value) == (6.0, 6.0)
    assert tied.assigned.options == (0, 1, 0)


def test_nothing_is_printed() -> None:
    code = (
        "import numpy as np; from autopipe.solvers import ilp; from autopipe.solvers.device_dp import Option;"
        "w = np.where(np.triu(np.ones((2, 4, 4)), 1) > 0, 1.0, np.inf);"
        "assert ilp.smallest_maximum([Option(0, w)], [2]).proved"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@given(cases(), st.integers(0, 30), st.booleans())
@settings(max_examples=500, deadline=None)
def test_agrees_with_the_dynamic_program_many_times(case: Case, repeats: int, cut: bool) -> None:
    options, available, _ = case
    expected = device_dp.smallest_step(options, available, repeats)
    agree(
        ilp.smallest_step(options, available, repeats, cutoff=expected.value if cut and expected else np.inf), expected
    )
