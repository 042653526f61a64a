"""A model whose head is most of it, for real: planned cuts against equal layers and one process, on two ranks.

    python benchmarks/head.py [--rounds 5]

An untied GPT-2 of six blocks of 256 with 50,257 words, batch 8 of 128 tokens, is profiled with both ranks busy and
planned as a pipeline of two in the best order of all, as one whose micro-batches go both ways, and freely; equal layers
run 1F1B or GPipe and the micro-batch that suits them best. One step of each, and one of one process with the other
idle, in every round. ``bound`` is what no plan of that row's space gets below, by the profile, over the predicted step
of equal layers. Needs two free cores and three minutes. Exit code 1 where neither pipeline's step is at most 0.75 of
that of equal layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopipe
from autopipe.baselines import BASELINES
from autopipe.core.plan import Plan
from autopipe.core.schedule import kinds
from autopipe.core.spread import error_of_median
from autopipe.core.timeline import Span, Timeline
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.checking.plans import runner_of
from autopipe.runtime.measuring.links import measure_cluster
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import own_device
from autopipe.runtime.running.runner import make_optimizer
from autopipe.runtime.workload import ModelFile

RANKS, BATCH, TOKENS, VOCABULARY = 2, 8, 128, 50_257
GOAL = 0.75
ALONE, EQUAL = "one process", "equal layers"
PIPELINES = ("pipeline", "two ways")

Steps = dict[str, list[list[Span]]]
"""The spans of each plan's steps on one rank."""


def build_model() -> nn.Module:
    """The model; the input embedding and the head are two parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=256,
        n_layer=6,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tokens, and those that follow them."""
    tokens = torch.randint(VOCABULARY, (batch_size, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def plans_of(profile: autopipe.Profile, cluster: autopipe.Cluster) -> dict[str, Plan]:
    """The best pipelines of two ranks, equal layers, one process, and what is planned where nothing is asked for."""
    cuts = BASELINES[EQUAL](profile, RANKS)
    assert cuts is not None
    pins = {layer.name: sum(cut <= index for cut in cuts) for index, layer in enumerate(profile.layers)}

    def planned(depth: int, **asked: Any) -> Plan:
        return autopipe.plan(profile, cluster, global_batch=BATCH, depths=[depth], replicas=[1], **asked)

    return {
        "pipeline": planned(RANKS, schedules=[kind.name for kind in kinds("torch")]),
        "two ways": planned(RANKS, schedules=["Chimera"]),
        EQUAL: planned(RANKS, pins=pins),
        ALONE: planned(1),
        "free": autopipe.plan(profile, cluster, global_batch=BATCH),
    }


def run_plans(plans: dict[str, Plan], rounds: int) -> tuple[Steps, list[float]]:
    """On each rank: one step of every plan in each round, the first not counted; and the seconds of rank 0 alone."""
    device = own_device("cpu")
    workload, alone = ModelFile(__file__).open(), ModelFile(__file__).open()
    batch = workload.batch(BATCH)
    runners = {name: runner_of(plan, workload, batch, device) for name, plan in plans.items() if name != ALONE}
    optimizers = {name: make_optimizer("adamw", runner.parameters, 1e-6) for name, runner in runners.items()}
    single, optimizer = plans[ALONE], make_optimizer("adamw", [*alone.model.parameters()], 1e-6)
    steps: Steps = {name: [] for name in runners}
    seconds = []
    for index in range(rounds + 1):
        for name, runner in runners.items():
            launch.beat.phase(f"round {index} of {rounds}")
            runner.timed_step(runner.split(*batch), optimizers[name])
            if index:
                steps[name].append(runner.recorder.spans())
        launch.beat.phase(f"round {index} of {rounds}, one process")
        dist.barrier()
        if dist.get_rank() == 0:
            start = time.perf_counter()
            _step_alone(alone, batch, single.micro_batch, optimizer)
            seconds += [time.perf_counter() - start] * (index > 0)
        dist.barrier()
    return steps, seconds


def _step_alone(workload: Any, batch: tuple[Any, Any], size: int, optimizer: torch.optim.Optimizer) -> None:
    """The model as it is: the same micro-batches, accumulated, and the optimizer."""
    inputs, target = batch
    for start in range(0, BATCH, size):
        part = {name: value[start : start + size] for name, value in inputs.items()}
        loss = loss_fn(workload.model(**part), target[start : start + size]) * (size / BATCH)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def report(plans: dict[str, Plan], seconds: dict[str, list[float]]) -> float:
    """Print a line a plan; the better pipeline's step over that of equal layers, round by round."""
    heads = ("", "stages", "micro-batch", "predicted", "measured", "of equal layers", "noise", "bound")
    print("{:13} {:44} {:>11} {:>10} {:>10} {:>16} {:>7} {:>6}".format(*heads))
    ratios = {name: [one / other for one, other in zip(seconds[name], seconds[EQUAL], strict=True)] for name in plans}
    for name, plan in plans.items():
        stages = " | ".join(_layers(stage.layers) for stage in plan.stages[: plan.depth])
        stages += f", {plan.replicas} replicas" if plan.replicas > 1 else ""
        measured = format_duration(statistics.median(seconds[name]))
        row = f"{name:13} {stages:44} {plan.micro_batch:11} {format_duration(plan.predicted.step_s):>10} {measured:>10}"
        bound = plan.lower_bound_s / plans[EQUAL].predicted.step_s
        noise = format_percent(error_of_median(ratios[name]))
        print(f"{row} {statistics.median(ratios[name]):16.3f} {noise:>7} {bound:6.3f}")
    return min(statistics.median(ratios[name]) for name in PIPELINES)


def _layers(names: tuple[str, ...]) -> str:
    short = [name.removeprefix("transformer.") for name in names]
    return short[0] if len(short) == 1 else f"{short[0]} … {short[-1]}"


def main() -> None:
    """Profile, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "head.profile.json"
        profile = autopipe.profile(__file__, devices=RANKS, micro_batches=(1, 2, 4, 8), budget_s=30, save=saved)
    cluster = measure_cluster(RANKS)
    plans = plans_of(profile, cluster)
    ranks = launch.launch(run_plans, (plans, rounds), ranks=RANKS, timeout_s=600)
    seconds = {
        name: [
            Timeline.of_ranks(step, "measured").step_s
            for step in zip(*(steps[name] for steps, _ in ranks), strict=True)
        ]
        for name in plans
        if name != ALONE
    }
    part = report(plans, {**seconds, ALONE: ranks[0][1]})
    verdict = "met" if part <= GOAL else "missed"
    print(f"the better pipeline over equal layers {part:.3f}; goal {GOAL} at the most: {verdict}")
    sys.exit(part > GOAL)


if __name__ == "__main__":
    main()
