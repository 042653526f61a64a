"""Every model of the zoo on 2, 3 and 4 ranks, with whole and with split backwards: parity with one process."""

from __future__ import annotations

import pytest
import torch

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.schedule import kind
from autopipe.runtime.capture import capture
from autopipe.runtime.parity import RankParity, compare, relative
from autopipe.runtime.reduction import find_reduction
from autopipe.runtime.runner import Runner
from autopipe.runtime.workload import SEED, Workload
from tests.models import ZOO
from tests.runtime.chained import captured_case, legal_cuts
from tests.runtime.ranks import Ranks
from tests.runtime.test_stages import spread

MICRO_BATCHES, TOLERANCE = 4, 1e-5


def opened(name: str) -> Workload:
    case = ZOO[name]
    torch.manual_seed(SEED)
    return Workload(name, case.build_model(), case.example_batch, case.loss_fn)


def trained(name: str, cuts: list[int], schedules: list[str]) -> list[RankParity]:
    """On each rank: two steps under each schedule, and the same in one process."""
    size, found = 4 if ZOO[name].fixed else 2, []
    ranks = torch.distributed.get_world_size()
    reduction, _ = find_reduction(opened(name), "float32")
    for schedule in schedules:
        workload, reference = opened(name), opened(name).model
        inputs, target = workload.batch(size)
        captured = capture(workload.model, inputs, loss=lambda made, w=workload, t=target: w.loss(made, t))
        runner = Runner(
            captured,
            kind(schedule).schedule(ranks, MICRO_BATCHES),
            cuts,
            micro_batch=size,
            loss_fn=workload.loss,
            device=torch.device("cpu"),
            reduction=reduction,
        )
        found.append(compare(runner, reference, workload, workload.batch(size * MICRO_BATCHES)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in ZOO.values() if not case.refused])
def test_a_model_trains_as_one_process(ranks: Ranks, name: str) -> None:
    cuts = legal_cuts(captured_case(ZOO[name]))
    for stages in range(2, min(4, len(cuts) + 1) + 1):
        for parts in ranks.run(trained, name, spread(cuts, stages), ["1F1B", "ZB-H1"], ranks=stages):
            for parity in parts:
                assert parity.max_gradient_difference <= TOLERANCE, (stages, parity.worst)
                if parity.losses:
                    assert relative(parity.losses, parity.reference_losses) <= TOLERANCE
