"""The solvers under the objectives of published planners, on the inputs that these were published with.

    python benchmarks/planners.py --peer pipedream --input resnet50.txt --devices 16 --bandwidth 1e9
    python benchmarks/planners.py --peer pipedream --input resnet50.txt --levels 4,4 --bandwidths 10e9,1e9
    python benchmarks/planners.py --peer dnn-partitioning --input gnmt_inference.json --devices 6 --json
    python benchmarks/planners.py --peer piper --input bert32a100.json --devices 32 --memory 8589934592

What each objective says is in peers/. Prints the objective (seconds; ms for dnn-partitioning), whether it is proved to
be the smallest there is, the bound that was proved, the CPU seconds of reading and solving, and the stages. ``--order
linear`` looks at linear orders of the graph only, and proves nothing beyond its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from peers import dnn_partitioning, pipedream, piper

from autopipe.core.errors import AutopipeError


class Outcome(NamedTuple):
    """What is printed, without the time."""

    objective: float
    proved: bool
    lower_bound: float
    split: list[dict[str, Any]]


def solve_pipedream(args: argparse.Namespace) -> Outcome | None:
    """PipeDream: one level, or several."""
    profile, linear = pipedream.read(args.input), args.order == "linear"
    if args.levels:
        levels = [pipedream.Level(*each) for each in zip(args.levels, args.bandwidths, strict=True)]
        nested = pipedream.solve_levels(profile, levels, linear=linear)
        value, bound, sets, counts = nested
    else:
        level = pipedream.Level(args.devices, args.bandwidth)
        replicas = args.max_replicas or args.devices
        found = profile.solve(level, replicas=replicas, linear=linear, seconds=args.seconds)
        if found is None:
            return None
        value, bound, sets, counts = found.value, found.lower_bound, found.sets, [o + 1 for o in found.options]
    stages = zip(counts, _nodes(profile.names, sets), strict=True)
    return _outcome(value, bound, [{"replicas": count, "nodes": nodes} for count, nodes in stages])


def solve_dnn_partitioning(args: argparse.Namespace) -> Outcome | None:
    """dnn-partitioning: so many accelerators, and the file's CPUs."""
    problem = dnn_partitioning.read(args.input)
    if args.memory:
        problem = replace(problem, memory_bytes=args.memory)
    found = problem.solve(args.devices, linear=args.order == "linear", seconds=args.seconds)
    if found is None:
        return None
    groups = [" ".join(map(str, each)) for each in problem.names]
    device = {dnn_partitioning.ACCELERATOR: "accelerator", dnn_partitioning.CPU: "CPU"}
    stages = zip(found.options, _nodes(groups, found.sets), strict=True)
    return _outcome(found.value, found.lower_bound, [{"device": device[o], "nodes": nodes} for o, nodes in stages])


def solve_piper(args: argparse.Namespace) -> Outcome | None:
    """Piper: data and tensor parallelism, and recomputation."""
    problem, linear = piper.read(args.input), args.order == "linear"
    devices, memory = args.devices or problem.devices, args.memory or problem.memory_bytes
    bandwidth, replicas = args.bandwidth or problem.bytes_per_s, args.max_replicas or problem.batch
    found = piper.solve(problem, devices, memory, bandwidth, replicas=replicas, linear=linear)
    if found is None:
        return None
    sets = [0, *(stage.until for stage in found.stages)]
    stages = [
        {"tensor": stage.tensor, "data": stage.data, "seconds": stage.seconds, "nodes": nodes}
        for stage, nodes in zip(found.stages, _nodes(problem.names, sets), strict=True)
    ]
    return _outcome(found.value, 0.0 if linear else found.value, stages)


def _outcome(value: float, bound: float, split: list[dict[str, Any]]) -> Outcome:
    return Outcome(value, bound >= value * (1 - 1e-9), bound, split)


def _nodes(names: Sequence[str], sets: Sequence[int]) -> Iterator[list[str]]:
    """The names of the nodes between neighbouring ideals."""
    for inner, outer in pairwise(sets):
        yield [name for number, name in enumerate(names) if (outer & ~inner) >> number & 1]


PEERS: dict[str, Callable[[argparse.Namespace], Outcome | None]] = {
    "pipedream": solve_pipedream,
    "dnn-partitioning": solve_dnn_partitioning,
    "piper": solve_piper,
}


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(each) for each in text.split(",")]


def arguments() -> argparse.Namespace:
    """What the command line says. Exits with 2 where it contradicts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--input", type=Path, required=True, help="a file that the peer reads")
    parser.add_argument("--devices", type=int, help="devices to use at most; piper: default as the file says")
    parser.add_argument("--bandwidth", type=float, help="bytes a second; piper: default as the file says")
    parser.add_argument("--levels", type=_numbers(int), help="machines of each level, innermost first, as in 4,4")
    parser.add_argument("--bandwidths", type=_numbers(float), help="bytes a second of each level, as in 10e9,1e9")
    parser.add_argument("--memory", type=float, help="bytes a device; default as the file says")
    parser.add_argument("--max-replicas", type=int, help="replicas of a stage at most; default any number")
    parser.add_argument("--order", choices=("dag", "linear"), default="dag", help="all splits, or linear orders only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="CPU seconds after which a bound will do")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.levels and len(args.levels) != len(args.bandwidths or []):
        parser.error(f"--levels has {len(args.levels)} numbers, --bandwidths {len(args.bandwidths or [])}")
    if args.peer == "pipedream" and not args.levels and not (args.devices and args.bandwidth):
        parser.error("pipedream needs --devices and --bandwidth, or --levels and --bandwidths")
    if args.peer == "dnn-partitioning" and not args.devices:
        parser.error("dnn-partitioning needs --devices, the number of accelerators")
    return args


def main() -> None:
    """Solve and print."""
    args = arguments()
    start = time.process_time()
    try:
        outcome = PEERS[args.peer](args)
    except (AutopipeError, OSError) as error:
        sys.exit(f"error: {error}")
    cpu_s = time.process_time() - start
    if outcome is None:
        sys.exit("no split fits: use more devices or more memory")
    if args.json:
        print(json.dumps({**outcome._asdict(), "cpu_s": cpu_s}))
        return
    proof = "proved" if outcome.proved else f"not below {outcome.lower_bound:.6g}"
    print(f"objective {outcome.objective:.6g} · {proof} · {cpu_s:.2f} s of CPU")
    for number, stage in enumerate(outcome.split):
        where = ", ".join(f"{key} {value}" for key, value in stage.items() if key != "nodes")
        nodes = stage["nodes"]
        print(f"stage {number}: {where}, {len(nodes)} nodes, {nodes[0]} … {nodes[-1]}")


if __name__ == "__main__":
    main()
