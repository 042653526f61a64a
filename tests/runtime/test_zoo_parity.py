"""Every model of the zoo on 2, 3 and 4 ranks, with whole and with split backwards: parity with one process."""

from __future__ import annotations

import pytest
import torch

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.schedule import kind
from autopipe.runtime.checking.parity import RankParity, compare, relative
from autopipe.runtime.running.runner import Runner
from tests.models import ZOO
from tests.runtime.chained import legal_cuts
from tests.runtime.ranks import Ranks
from tests.runtime.test_stages import spread
from tests.runtime.twins import twin

MICRO_BATCHES, TOLERANCE = 4, 1e-5


def trained(name: str, cuts: list[int], schedules: list[str]) -> list[RankParity]:
    """On each rank: two steps under each schedule, and the same in one process."""
    pair, found = twin(name), []
    for schedule in schedules:
        with pair.anew():
            runner = Runner(
                pair.captured,
                kind(schedule).schedule(torch.distributed.get_world_size(), MICRO_BATCHES),
                cuts,
                micro_batch=pair.size,
                loss_fn=pair.workload.loss,
                device=torch.device("cpu"),
                reduction=pair.reduction,
            )
            batch = pair.workload.batch(pair.size * MICRO_BATCHES)
            found.append(compare(runner, pair.reference.model, pair.workload, batch))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in ZOO.values() if not case.refused])
def test_a_model_trains_as_one_process(ranks: Ranks, name: str) -> None:
    cuts = legal_cuts(twin(name).captured)
    for stages in range(2, min(4, len(cuts) + 1) + 1):
        by_rank = ranks.run(trained, name, spread(cuts, stages), ["1F1B", "ZB-H1"], ranks=stages)
        for parts in zip(*by_rank, strict=True):
            assert [len(part.losses) for part in parts if part.losses] == [2]
            for parity in parts:
                assert parity.max_gradient_difference <= TOLERANCE, (stages, parity.worst)
                if parity.losses:
                    assert relative(parity.losses, parity.reference_losses) <= TOLERANCE
