"""A small profile, cluster, plan and check result, made by hand: what the tests of plain data and of reports use."""

from __future__ import annotations

from dataclasses import replace

from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.core.plan import FileRef, ModelRef, Plan, Prediction, Rejected, ScheduleTable, Stage, TiedParameter
from autopipe.core.profile import CostTable, Edge, Layer, LayerCost, Profile, Tie
from autopipe.core.result import CheckResult, Measured, MeasuredStage, Parity, Rehearsal
from autopipe.core.stage import stage_cost
from autopipe.core.timeline import Memory, Span, Timeline
from autopipe.simulate import simulate

MIB = 2**20
LINK = Link(14e-6, 12e9)
ORDER = (
    ("0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"),
    ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"),
)


def cost(forward_s: float, micro_batch: int, held: int) -> LayerCost:
    """A layer that takes ``forward_s`` a sample and twice that backward."""
    forward = forward_s * micro_batch
    return LayerCost(
        forward_s=forward,
        backward_s=2 * forward,
        input_grad_s=forward,
        weight_grad_s=forward,
        held_after_forward_bytes=held * micro_batch,
        held_after_input_grad_bytes=held * micro_batch // 2,
        output_bytes=128 * 256 * 4 * micro_batch,
        workspace_bytes=MIB,
        optimizer_s=1e-3,
        spread=0.012,
    )


def profile() -> Profile:
    """An embedding, four blocks and a head that is tied to the embedding, at micro-batches 1 and 2."""
    names = ("wte", *(f"h.{i}" for i in range(4)), "lm_head")
    layers = tuple(
        Layer(name, size, size // 4, (name,), structure=name.partition(".")[0])
        for name, size in zip(names, (2 * MIB, *(3 * MIB,) * 4, 2 * MIB), strict=True)
    )
    edges = (
        Edge("input_ids", None, (0,), ("b", 128), "int64", needs_gradient=False),
        *(Edge(f"{names[i]}.out", i, (i + 1,), ("b", 128, 256), "float32") for i in range(5)),
    )
    times = (0.2e-3, *(1.5e-3,) * 4, 1.1e-3)
    tables = tuple(CostTable(size, tuple(cost(seconds, size, 5 * MIB) for seconds in times)) for size in (1, 2))
    return Profile(
        model="gpt2.py",
        layers=layers,
        edges=edges,
        costs=tables,
        device="cpu",
        dtype="float32",
        ties=(Tie("wte.weight", (0, 5), 2 * MIB),),
        processes=2,
        overhead_s=120e-6,
        noise=0.008,
        structure="0123456789abcdef",
        versions={"torch": "2.13.0"},
    )


def cluster(ranks: int = 2) -> Cluster:
    """Equal CPU processes over one tier, the first pair of them a little slower."""
    return Cluster(
        "local",
        (Device("cpu", 4096 * MIB, ranks),),
        (Tier("gloo", ranks, LINK),),
        (Pair(0, 1, Link(20e-6, 11e9)),),
        "measured",
    )


def plan() -> Plan:
    """1F1B on two ranks, four micro-batches of two, cut before h.2."""
    source, bounds = profile(), ((0, 3), (3, 6))
    stages = tuple(
        Stage(
            index=index,
            rank=index,
            start=start,
            stop=stop,
            layers=tuple(layer.name for layer in source.layers[start:stop]),
            modules=tuple(name for layer in source.layers[start:stop] for name in layer.modules),
            costs=stage_cost(source, start, stop, 2),
            receives=source.crossing(start) if start else (),
            sends=source.crossing(stop) if stop < 6 else (),
        )
        for index, (start, stop) in enumerate(bounds)
    )
    schedule = ScheduleTable("1F1B", (0, 1), ORDER)
    timeline = simulate(schedule.parsed(), [stage.costs for stage in stages], (LINK,), overhead_s=source.overhead_s)
    step_s = timeline.step_s
    bound_s = step_s / 1.05
    return Plan(
        model=ModelRef("gpt2.py", "examples/gpt2.py", digest="ab" * 32),
        profile=FileRef("ef" * 32, "examples/gpt2.profile.json"),
        cluster=FileRef("cd" * 32),
        device="cpu",
        dtype="float32",
        threads=1,
        optimizer="adamw",
        global_batch=8,
        micro_batch=2,
        micro_batches=4,
        depth=2,
        replicas=1,
        stages_per_rank=1,
        schedule=schedule,
        stages=stages,
        hops=(LINK,),
        ties=(TiedParameter("wte.weight", (0, 1), 2 * MIB),),
        overhead_s=120e-6,
        memory_limit_bytes=(128 * MIB, 128 * MIB),
        predicted=Prediction(step_s, 8 / step_s, timeline.idle, timeline.peak_bytes),
        lower_bound_s=bound_s,
        gap=step_s / bound_s - 1,
        limited_by="stage 1",
        noise=0.008,
        rejected=(
            Rejected("equal layers, 1F1B", "+7.0 %", 1.07 * step_s, 0.29, 101 * MIB),
            Rejected("one device, no pipeline", "over the 128 MiB limit on rank 0", 1.8 * step_s, 0.0, 199 * MIB),
            Rejected("1F1B, 8 micro-batches of 1", "8 micro-batches of 1 were not profiled"),
        ),
        notes=("2 of 4 devices are used: more do not help",),
        provenance={"autopipe": "0.1.0"},
    )


def check_result() -> CheckResult:
    """A run of ``plan()`` that took 2 % longer than predicted and kept parity."""
    made = plan()
    predicted = simulate(
        made.schedule.parsed(), [stage.costs for stage in made.stages], made.hops, overhead_s=made.overhead_s
    )
    slower = 1.02
    spans = tuple(Span(rank, action, slower * start, slower * end) for rank, action, start, end in predicted.spans)
    step_s = slower * predicted.step_s
    peaks = tuple(peak + MIB for peak in predicted.peak_bytes)
    return CheckResult(
        predicted=made.predicted,
        measured=Measured(step_s, 0.011, 8 / step_s, peaks, (700 * MIB, 690 * MIB)),
        error=step_s / made.predicted.step_s - 1,
        parity=Parity(True, 2.1e-7, 3.4e-6, (8.31, 8.02), (8.31, 8.02), 1e-5, "h.3.attn.c_attn.weight"),
        timeline=Timeline(2, spans, tuple((Memory(0.0, peak),) for peak in peaks), step_s, "measured"),
        stages=(MeasuredStage(6.5e-3, 12.9e-3), MeasuredStage(8.3e-3, 16.4e-3)),
        notes=("dropout probability 0 where losses are compared",),
        plan_digest=made.digest,
    )


def rehearsal() -> Rehearsal:
    """A rehearsal of ``plan()``, twice as slow as it is, that took 1 % longer than expected."""
    made = plan()
    slow = simulate(
        made.schedule.parsed(),
        [stage_cost(profile(), stage.start, stage.stop, 2, speed=0.5) for stage in made.stages],
        made.hops,
        overhead_s=0.4e-3,
    )
    step_s = 1.01 * slow.step_s
    measured = replace(slow, step_s=step_s, origin="emulated", memory=((), ()))
    note = "all times are stretched 2 times: shorter waits would not be exact"
    return Rehearsal(slow, measured, step_s, 0.004, 2.0, 0.4e-3, 0.2e-3, (note,), made.digest)
