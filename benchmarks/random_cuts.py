"""Random cuts under random schedules, on real ranks: how many train otherwise than one process?

    python benchmarks/random_cuts.py [--draws 500] [--ranks 2,3,4] [--models NAME,…] [--emulated]

A draw takes a model of tests/models.py, ranks, a table (a named schedule, or any valid order of whole and split
backwards with stages anywhere), legal cuts, layers that recompute and a number of micro-batches. Two training steps are
compared with one process by losses, every gradient and every buffer, as autopipe check does. Prints every wrong
draw, and their number after each model and at the end. ``--emulated`` runs the same stages by the same tables in one
process, without the ranks' messages: a tenth of the processor time.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.errors import UsageError
from autopipe.core.schedule import Schedule, kinds
from autopipe.runtime.checking.draws import same_draws
from autopipe.runtime.checking.parity import TOLERANCE, RankParity, compare, note_buffers, note_gradients, relative
from autopipe.runtime.ranks import launch
from autopipe.runtime.running.in_turn import check_in_turn
from autopipe.runtime.running.runner import Runner
from autopipe.runtime.stages.modules import build_stages
from tests.models import ZOO
from tests.runtime.chained import eager, take_steps
from tests.runtime.tabled import tabled
from tests.runtime.twins import Twin, twin
from tests.synthetic import random_schedule

MOST_STAGES = 6


class Draw(NamedTuple):
    """One draw and how far it was from one process."""

    what: str
    losses: float
    gradients: float
    worst: str

    @property
    def right(self) -> bool:
        """Whether it is within the parity's tolerance for float32."""
        return self.losses <= TOLERANCE[torch.float32] and self.gradients <= TOLERANCE[torch.float32]


def table(rng: random.Random, ranks: int, most: int, *, in_turn: bool) -> Schedule:
    """A named schedule that takes the shape, or any valid table, with at most so many stages.

    A model whose forward leaves something for the next one needs its forwards ``in_turn``: others are refused.
    """
    while True:
        batches = rng.choice((2, 3, 4, 6, 8))
        if rng.random() < 0.5:
            stages = rng.randint(ranks, most)
            return random_schedule(rng, ranks=ranks, stages=stages, micro_batches=batches, in_turn=in_turn)
        chosen = rng.choice([kind for kind in kinds() if kind.placement in ("loop", "v")])
        per_rank = rng.choice(chosen.stages_per_rank or (1, 2))
        try:
            made = chosen.schedule(ranks, batches, stages_per_rank=per_rank)
        except UsageError:
            continue
        if made.stages <= most and made.per_update == made.micro_batches and made.ways == 1:
            return made


def draws(names: list[str], ranks: int, count: int, *, emulated: bool) -> list[Draw]:
    """So many draws of each model: on each rank, or of all ranks in one process."""
    found: list[Draw] = []
    wrong = 0
    for name in names:
        of_this = of_model(name, ranks, count, emulated=emulated)
        bad = any_rank([not draw.right for draw in of_this], emulated=emulated)
        found, wrong = found + of_this, wrong + sum(bad)
        what = "".join(f"; wrong: {draw.what}" for draw, is_bad in zip(of_this, bad, strict=True) if is_bad)
        say(f"{len(found)} draws on {ranks} ranks, {wrong} wrong, the last ones of {name}{what}", emulated=emulated)
    return found


def any_rank(flags: list[bool], *, emulated: bool) -> list[bool]:
    """For each flag whether it is set on any rank."""
    if emulated or not flags:
        return flags
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def say(text: str, *, emulated: bool) -> None:
    """Tell how far it is, at once: a run that is broken off has counted until there."""
    if emulated or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def of_model(name: str, ranks: int, count: int, *, emulated: bool) -> list[Draw]:
    """Draws of one model; one capture serves all of them."""
    pair = twin(name)
    layers = pair.captured.layers
    legal = [n + 1 for n, layer in enumerate(layers[:-1]) if layer.cut_after]
    if len(legal) + 1 < ranks:
        return []
    rng, found = random.Random(f"{name} {ranks}"), []
    for number in range(count):
        launch.beat.phase(f"draw {number + 1} of {count} of {name} on {ranks} ranks")
        in_turn = bool(pair.captured.carried(0, len(layers)))
        chosen = table(rng, ranks, min(MOST_STAGES, len(legal) + 1), in_turn=in_turn)
        cuts = sorted(rng.sample(legal, chosen.stages - 1))
        again = [layer for layer in range(len(layers)) if rng.random() < 0.3]
        with pair.anew():
            parity = (in_one_process if emulated else on_ranks)(pair, chosen, cuts, again)
        losses = relative(parity.losses, parity.reference_losses) if parity.losses else 0.0
        what = f"{name} {chosen.name} on {ranks} ranks, cuts {cuts}, recompute {again}"
        found.append(Draw(what, losses, parity.max_gradient_difference, parity.worst))
    return found


def on_ranks(pair: Twin, chosen: Schedule, cuts: list[int], again: list[int]) -> RankParity:
    """This rank's part of two steps, against one process."""
    runner = Runner(
        pair.captured,
        chosen,
        cuts,
        micro_batch=pair.size,
        loss_fn=pair.workload.loss,
        device=torch.device("cpu"),
        recompute=again,
        reduction=pair.reduction,
    )
    batch = pair.workload.batch(pair.size * chosen.micro_batches)
    return compare(runner, pair.reference.model, pair.workload, batch)


def in_one_process(pair: Twin, chosen: Schedule, cuts: list[int], again: list[int]) -> RankParity:
    """Two steps of all ranks' stages, against the model as it is."""
    case, model, reference = ZOO[pair.workload.name], pair.workload.model, pair.reference.model
    check_in_turn(pair.captured, chosen, cuts)
    stages = build_stages(pair.captured, cuts, recompute=again, deferred=chosen.splits_backward)
    result = RankParity()
    for step in range(2):
        torch.manual_seed(step)
        batches = [case.example_batch(pair.size) for _ in range(chosen.micro_batches)]
        with same_draws(pair.captured):
            result.reference_losses.append(sum(eager(case, reference, batches)))
            result.losses.append(sum(tabled(case, pair.captured, stages, chosen, batches)))
        note_gradients(result, [model], reference)
        note_buffers(result, [model], reference)
        take_steps(model, reference)
    return result


def main() -> None:
    """Print wrong draws and the count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--models", default=",".join(name for name, case in ZOO.items() if not case.refused))
    parser.add_argument("--emulated", action="store_true", help="all ranks in one process")
    options = parser.parse_args()
    names, numbers = options.models.split(","), list(map(int, options.ranks.split(",")))
    each = -(-options.draws // (len(names) * len(numbers)))
    wrong, schedules = 0, Counter[str]()
    for ranks in numbers:
        run = functools.partial(draws, names, ranks, each, emulated=options.emulated)
        parts = [run()] if options.emulated else launch.launch(run, (), ranks=ranks, timeout_s=600.0)
        for same in zip(*parts, strict=True):
            schedules[same[0].what.split(" ")[1]] += 1
            bad = [draw for draw in same if not draw.right]
            wrong += bool(bad)
            for draw in bad:
                print(
                    f"wrong  {draw.what}: losses {draw.losses:.1e}, gradients {draw.gradients:.1e} in {draw.worst}",
                    flush=True,
                )
    where = "emulated ranks" if options.emulated else "ranks"
    print(f"{schedules.total()} random cuts under {len(schedules)} schedules on {options.ranks} {where}: {wrong} wrong")
    print(", ".join(f"{name} {number}" for name, number in schedules.most_common()))


if __name__ == "__main__":
    main()
