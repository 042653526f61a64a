"""Replicas of a pipeline train as one process does on the whole global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.runtime.checking.plans import check_rank, combine
from autopipe.runtime.running.batches import share_of
from autopipe.runtime.running.replicas import GradientSums, Replica
from autopipe.runtime.running.shares import pieces
from autopipe.runtime.workload import ModelFile
from tests.runtime.planned import plan_of, zoo_file
from tests.runtime.ranks import Ranks


@pytest.mark.parametrize("name", ["gpt2", "resnet", "uneven_tokens", "summed", "byol", "hidden_state"])
def test_replicas_have_the_losses_and_gradients_of_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Ties between ranks, buffers and parameters that change, a mean over unequal counts, a sum, plain attributes."""
    path = zoo_file(tmp_path, name)
    plan = plan_of(path, 2, "1F1B", replicas=2)
    parts = ranks.run(check_rank, plan, ModelFile(str(path)), "cpu", ranks=4)
    result = combine(plan, parts, "cpu")
    assert result.parity.passed, result.parity
    assert result.timeline.ranks == 4
    assert len(result.measured.peak_bytes) == 2
    assert {span.rank for span in result.timeline.spans} == {0, 1, 2, 3}


def test_data_parallelism_without_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    """What the search chooses for small models: the whole model on each rank."""
    path = zoo_file(tmp_path, "gpt2")
    plan = plan_of(path, 1, "1F1B", replicas=2)
    assert (plan.depth, plan.replicas, len(plan.stages)) == (1, 2, 1)
    result = combine(plan, ranks.run(check_rank, plan, ModelFile(str(path)), "cpu", ranks=2), "cpu")
    assert result.parity.passed, result.parity
    assert result.timeline.ranks == 2
    assert len(result.measured.peak_bytes) == 1


def sums() -> tuple[list[Any], list[Any]]:
    """On each of 4 ranks, 2 replicas of 2: own, tied, unused anywhere, used on one process only; two steps."""
    replica = Replica.join(2, 2)
    own, tied, never, once = (nn.Parameter(torch.zeros(3)) for _ in range(4))
    alone = (replica.rank,)
    total = GradientSums(replica, {own: alone, tied: (0, 1), never: alone, once: alone}, [(0, 1)])
    found = []
    for _ in range(2):
        total.prepare()
        for parameter in (own, tied, *([once] if dist.get_rank() == 3 else [])):
            given = torch.full((3,), 10.0 ** dist.get_rank())
            parameter.grad = given if parameter.grad is None else parameter.grad + given
        total.run()
        found.append([None if p.grad is None else p.grad[0].item() for p in (own, tied, never, once)])
    return found[0], found[1]


def test_gradients_are_summed_over_who_holds_them_and_accumulate(ranks: Ranks) -> None:
    for rank, (first, second) in enumerate(ranks.run(sums, ranks=4)):
        mine = 101.0 if rank % 2 == 0 else 1010.0
        used = None if rank % 2 == 0 else 1000.0
        assert first == [mine, 1111.0, None, used]
        assert second == [2 * mine, 2222.0, None, used and 2 * used]


def wrong_number() -> str:
    with pytest.raises(UsageError) as caught:
        Replica.join(2, 2)
    return str(caught.value)


def test_another_number_of_processes_is_refused(ranks: Ranks) -> None:
    assert "2 processes were started, the plan is for 4" in ranks.run(wrong_number, ranks=2)[0]


@pytest.mark.parametrize(("size", "replicas"), [(16, 2), (5, 2), (1, 2), (24, 3), (7, 3)])
def test_every_row_is_some_replicas(size: int, replicas: int) -> None:
    cuts = pieces(size, 2)
    parts = [share_of(cuts, replica, replicas) for replica in range(replicas)]
    assert [cut for part in parts for cut in part] == cuts
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
