"""Rehearsed plans: every action runs once and in order, waits as long as it should, and for its message's link."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopipe.schedules  # noqa: F401  registers the schedules
from autopipe.core.cluster import Link
from autopipe.core.errors import UsageError
from autopipe.core.in_flight import kept
from autopipe.core.plan import Plan, ScheduleTable
from autopipe.core.schedule import Action, Op, kind
from autopipe.core.timeline import Span
from autopipe.runtime.checking import rehearsal
from autopipe.runtime.checking.rehearsal import Costs, Done, RankPart, expected, machine_costs, planned_job, rehearse
from autopipe.simulate import simulate_plan
from tests.samples import plan as sample
from tests.synthetic import stage

LINK = Link(0.004, 1e8)


def planned(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1, forward_s: float = 0.004) -> Plan:
    """A plan of stages that differ, 64 kB between them."""
    table = kind(name).schedule(ranks, micro_batches, stages_per_rank=stages_per_rank)
    stages = tuple(
        replace(
            sample().stages[0],
            index=s,
            rank=table.placement[s],
            start=s,
            stop=s + 1,
            layers=(f"layers.{s}",),
            costs=stage(forward_s * (1 + s / 4), 2 * forward_s, optimizer_s=0.002, send=65536, receive=65536),
        )
        for s in range(table.stages)
    )
    hops = tuple(None if a == b else LINK for a, b in zip(table.placement, table.placement[1:], strict=False))
    return replace(
        sample(),
        schedule=ScheduleTable.of(table),
        stages=stages,
        hops=hops,
        ties=(),
        depth=ranks,
        stages_per_rank=stages_per_rank,
        micro_batch=1,
        micro_batches=micro_batches,
        global_batch=micro_batches,
        memory_limit_bytes=(2**40,) * ranks,
        predicted=replace(sample().predicted, peak_bytes=(2**30,) * ranks),
    )


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(planned("1F1B", 2, 3), id="1F1B"),
        pytest.param(planned("ZB-V", 2, 4, 2), id="ZB-V", marks=pytest.mark.slow),
        pytest.param(planned("Interleaved1F1B", 4, 8, 2), id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_keeps_the_table_the_waits_and_the_links(plan, monkeypatch):
    monkeypatch.setattr(rehearsal, "STEPS", 1)
    result = rehearse(plan, timeout_s=120)
    assert result.factor == pytest.approx(rehearsal.SHORTEST_S / 0.004, rel=0.6)
    assert "stretched" in result.notes[0]
    spans = {span.action: span for span in result.measured.spans}
    table = plan.schedule.parsed()
    for rank, row in enumerate(table.order):
        done = [span.action for span in result.measured.spans if span.rank == rank and span.action.op is not Op.O]
        assert tuple(done) == row
    costs = planned_job(plan, result.factor, 1.0).seconds
    for action, span in spans.items():
        assert span.end_s - span.start_s >= costs[action.stage][action.op]
        for needed, hop in _needs(action, plan):
            way_s = result.factor * hop.transfer_s(65536) if hop else 0.0
            assert span.start_s >= spans[needed].end_s + way_s
    assert result.step_s >= simulate_plan(replace(plan, overhead_s=0.0)).step_s * result.factor
    assert result.predicted.step_s > result.factor * simulate_plan(replace(plan, overhead_s=0.0)).step_s


def _needs(action: Action, plan: Plan) -> list[tuple[Action, Link | None]]:
    stage, op, batch = action
    if op is Op.F and stage:
        return [(Action(stage - 1, Op.F, batch), plan.hops[stage - 1])]
    if op in (Op.B, Op.I) and stage < len(plan.stages) - 1:
        back = [a for row in plan.schedule.parsed().order for a in row if a[0] == stage + 1 and a.micro_batch == batch]
        return [(a, plan.hops[stage]) for a in back if a.op in (Op.B, Op.I)]
    return []


def done(start_s: float, end_s: float, sent_s: float, wanted_s: float, text: str = "1F0") -> Done:
    return Done(Span(1, Action.parse(text), start_s, end_s), sent_s, wanted_s)


def test_the_machine_s_costs_are_read_off_what_waited_and_what_did_not():
    # the second action's value was there before the first began: 1 ms is the runtime's, and each overruns by 2 ms
    free = [done(10.0, 10.012, 9.0, 0.010), done(10.013, 10.025, 9.5, 0.010)]
    # the third one's was sent at 11.0, when the rank had long been waiting: it came 4 ms later, 1 ms the runtime's
    waited = [*free, done(11.004, 11.016, 11.0, 0.010)]
    large = [*free, done(11.009, 11.021, 11.0, 0.010)]
    costs = machine_costs([RankPart([], [waited], [large])] * 2)
    assert costs.overhead_s == pytest.approx(0.003)
    assert costs.empty_s == pytest.approx(0.003)
    assert costs.largest_s == pytest.approx(0.008)
    assert costs.way_s(0.5) == pytest.approx(0.0055)


def test_the_prediction_has_the_machine_s_costs_where_they_exceed_the_plan_s():
    plan = planned("1F1B", 2, 3, forward_s=0.01)
    job = planned_job(plan, 1.0, 1.0)
    plain = expected(plan, job, 1.0, Costs(0.0, 0.0, 0.0))
    assert plain.step_s == pytest.approx(simulate_plan(replace(plan, overhead_s=0.0)).step_s)
    slower = expected(plan, job, 1.0, Costs(0.001, 0.0, 0.0))
    assert slower.step_s == pytest.approx(simulate_plan(replace(plan, overhead_s=0.001)).step_s)
    way_s = LINK.transfer_s(65536)
    assert expected(plan, job, 1.0, Costs(0.0, way_s, way_s)).step_s == pytest.approx(plain.step_s)
    assert expected(plan, job, 1.0, Costs(0.0, 2 * way_s, 2 * way_s)).step_s > plain.step_s + way_s


def test_messages_shrink_to_fit_the_machine(monkeypatch):
    plan = planned("1F1B", 2, 3)
    monkeypatch.setattr(rehearsal, "machine_bytes", lambda: 2**40)
    assert rehearsal.message_part(plan) == 1.0
    total = sum(s.costs.buffers_bytes(*many) for s, many in zip(plan.stages, kept(plan.schedule.parsed()), strict=True))
    monkeypatch.setattr(rehearsal, "machine_bytes", lambda: 2 * total)
    assert rehearsal.message_part(plan) == 0.5


def test_a_schedule_that_torch_does_not_run_is_refused():
    plan = planned("1F1B", 2, 3)
    with pytest.raises(UsageError, match="does not run on torch's pipeline runtime"):
        rehearse(replace(plan, schedule=replace(plan.schedule, executor="own")))
