"""Two-way pipelines on real ranks: gradients of one process."""

from __future__ import annotations

import pytest
import torch

import autopipe.schedules  # noqa: F401
from autopipe.core.schedule import Schedule, kind
from autopipe.core.table_csv import from_csv, to_csv
from autopipe.runtime.checking.parity import RankParity, largest
from autopipe.runtime.running.batches import Part, Weighed
from autopipe.runtime.running.runner import Runner
from tests.models import ZOO
from tests.runtime.chained import captured_case, eager, in_float64, legal_cuts, reference_of, take_steps
from tests.runtime.ranks import Ranks
from tests.runtime.test_stages_on_ranks import note_differences

ROWS = 2


def worst_difference(
    name: str, schedule: Schedule, cuts: list[int], recompute: list[int], single: bool
) -> tuple[float, str, float]:
    """On every rank: two SGD steps and the same in one process; the largest relative difference, and the loss's."""
    case = ZOO[name] if single else in_float64(ZOO[name])
    captured = captured_case(case, batch=ROWS)
    reference = reference_of(case, captured.model)
    cpu = torch.device("cpu")
    runner = Runner(captured, schedule, cuts, micro_batch=ROWS, loss_fn=case.loss_fn, device=cpu, recompute=recompute)
    worst, off = RankParity(), 0.0
    for step in range(2):
        torch.manual_seed(step)
        batches = [case.example_batch(ROWS) for _ in range(schedule.micro_batches)]
        weighed = [Weighed(target, 1 / schedule.micro_batches) for _, target in batches]
        losses = runner.backward([Part(ROWS, [captured.bind(inputs) for inputs, _ in batches], weighed)])
        expected = eager(case, reference, batches)
        total = torch.tensor(sum(map(float, losses)), dtype=torch.float64)
        torch.distributed.all_reduce(total)
        off = largest((off, abs(float(total) - sum(expected))))
        note_differences(worst, captured.model, reference, runner)
        take_steps(reference, *runner.modules)
    return worst.max_gradient_difference, worst.worst, off


LARGEST = {"float64": 1e-12, "float32": 1e-6}
"""float64 tells a wrong sum from one in another order; float32, 6e-7 at most here, is what people train in."""


def check(ranks: Ranks, model: str, schedule: Schedule, *, precision: str = "float64", recompute: bool = False) -> None:
    captured = captured_case(ZOO[model])
    cuts, parts = legal_cuts(captured), schedule.stages // schedule.ways
    chosen = [cuts[n * len(cuts) // parts] for n in range(1, parts)]
    again = list(range(0, len(captured.layers), 2)) if recompute else []
    arguments = (model, schedule, chosen, again, precision == "float32")
    for worst, where, off in ranks.run(worst_difference, *arguments, ranks=schedule.ranks):
        assert worst <= LARGEST[precision], where
        assert off <= LARGEST[precision]


FAST = {("gpt2", "Chimera", 2, "float32"), ("gpt2", "Chimera", 2, "float64"), ("unet", "DualPipe", 2, "float64")}


def _cases() -> list[object]:
    names = ("Chimera", "Chimera-Doubled", "DualPipe")
    every = [
        (model, name, depth, precision)
        for model in ("gpt2", "unet")
        for name in names
        for depth in (2, 4)
        for precision in LARGEST
    ]
    marks = {case: () if case in FAST else (pytest.mark.slow,) for case in every}
    return [pytest.param(*case, marks=marks[case], id="-".join(map(str, case))) for case in every]


@pytest.mark.parametrize(("model", "name", "depth", "precision"), _cases())
def test_gradients_are_those_of_one_process(ranks: Ranks, model: str, name: str, depth: int, precision: str) -> None:
    check(ranks, model, kind(name).schedule(depth, 2 * depth), precision=precision)


@pytest.mark.slow
def test_layers_may_recompute(ranks: Ranks) -> None:
    check(ranks, "gpt2_untied", kind("Chimera").schedule(2, 5), recompute=True)


@pytest.mark.parametrize("name", [pytest.param("1F1B", marks=pytest.mark.slow), "ZB-V"])
def test_other_tables_run_on_our_own_runtime_too(ranks: Ranks, name: str) -> None:
    """Neighbouring stages on one rank, I and W apart, parts of the backward in any order."""
    table = kind(name).schedule(2, 4, stages_per_rank=1 if name == "1F1B" else 2)
    own = Schedule(name, table.placement, from_csv(to_csv(table), name).order, "own")
    check(ranks, "gpt2", own)
