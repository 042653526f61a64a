"""The conformance suite over the registry: a new schedule is tested as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopipe.synthesis
from autopipe.core.errors import UsageError
from autopipe.core.schedule import TWO_WAY, Action, Kind, Op, kinds
from autopipe.core.table_csv import from_csv, to_csv
from autopipe.core.validation import validate
from autopipe.simulate import simulate
from tests.conformance import chain_s, instances, peaks, shapes, work_s

CAPS = {
    "1F1B": lambda p: p,
    "ZB-H1": lambda p: p,
    "ZB-H2": lambda p: 2 * p - 1,
    "ZB-1p": lambda p: p,
    "ZB-2p": lambda p: 2 * p,
    "ZB-V": lambda p: p,
    "DualPipeV": lambda p: p + 0.5,
    "V-Half": lambda p: (p + 2) // 2,
    "V-Min": lambda p: (p + 4) // 3,
    "Synthesized": lambda p: p,
    "Chimera": lambda p: p / 2,
    "Chimera-Doubled": lambda p: p,
    "DualPipe": lambda p: (p + 1) / 2,
    "PipeDream": lambda p: p,
    "PipeDream-Sync": lambda p: p,
    "PipeDream-2BW": lambda p: p,
    "PipeMare": lambda p: p,
}
"""Micro-batches' activations that a rank may hold until W, by the paper of each; of a two-way one each way."""


@pytest.fixture(autouse=True, scope="module")
def _little_search() -> Iterator[None]:
    """A few orders are enough to test what must hold of any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autopipe.synthesis, "TRIES", 8)
        yield


every_kind = pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)


@every_kind
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_is_valid_and_does_all_work_once(kind: Kind, data: st.DataObject) -> None:
    table, shape, stages, hops = data.draw(instances(kind))
    validate(table)
    assert table.per_update == shape.micro_batches
    assert table.name == kind.name
    line = simulate(table, stages, hops)
    if table.asynchronous:
        assert line.step_s >= work_s(table, stages) / table.updates * (1 - 1e-9)
        return
    assert line.step_s >= max(work_s(table, stages), chain_s(stages, table)) * (1 - 1e-9)
    done = [span.action for span in line.spans if span.action.op is not Op.O]
    assert sorted(done) == sorted(action for row in table.order for action in row)


@every_kind
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_keeps_to_its_memory(kind: Kind, data: st.DataObject) -> None:
    table, shape, _, _ = data.draw(instances(kind))
    if kind.name in CAPS and shape.weight_part == 1.0:
        assert max(peaks(table)) <= CAPS[kind.name](shape.ranks)


@pytest.mark.parametrize("kind", kinds("torch"), ids=lambda kind: kind.name)
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_equal_arguments_give_equal_tables_and_survive_csv(kind: Kind, data: st.DataObject) -> None:
    table, _, _, _ = data.draw(instances(kind))
    again = from_csv(to_csv(table), kind.name)
    assert again == table


@every_kind
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_evaluates(kind: Kind, data: st.DataObject) -> None:
    table, shape, _, _ = data.draw(instances(kind))
    forwards = table.forward_only()
    validate(forwards, forward_only=True)
    batches = range(shape.micro_batches)
    every = {Action(s, Op.F, b) for s in range(shape.stages) for b in batches}
    found = {action for row in forwards.order for action in row}
    assert found <= every
    assert len(found) == len(every) / table.ways


@every_kind
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_it_refuses_it_refuses_with_a_reason(kind: Kind, data: st.DataObject) -> None:
    shape = data.draw(shapes(kind))
    reason = kind.refuses(shape)
    if reason:
        per_rank = 1 if kind.placement == TWO_WAY else len(shape.placement) // shape.ranks
        with pytest.raises(UsageError, match=f"{kind.name} cannot run {shape.micro_batches} micro-batch"):
            kind.schedule(shape.ranks, shape.micro_batches, stages_per_rank=per_rank)
