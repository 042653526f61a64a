"""The command line: parse, call, print. Results go to stdout, progress and errors to stderr.

Exit codes: 0 done; 1 no plan fits, a check failed, or a trainer cannot take the plan; 2 wrong usage, a bad file, or a
model that fails; 130 interrupted. Everything heavy is imported inside the verb that needs it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Literal

import typer

from autopipe import __version__, arguments
from autopipe.core.errors import AutopipeError
from autopipe.core.joined import is_first
from autopipe.stderr import line_of, progress, say

app = typer.Typer(
    name="autopipe",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py, model.py:BUILDER, or a file of another profiler.")
    ],
    devices: Annotated[int, typer.Option(min=1, help="How many processes are busy while a layer is timed.")] = 1,
    micro_batch: arguments.MicroBatch = None,
    threads: arguments.Threads = 1,
    budget: arguments.Budget = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer to time: sgd, momentum, adam, adamw.")] = "adamw",
    device: Annotated[
        str | None, typer.Option(metavar="h100", help="Compute the costs for this device, which need not be here.")
    ] = None,
    origin: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="Import: pipedream (graph.txt) or table (CSV).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="float32", help="Number format of imported figures.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The profile's file.")] = None,
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Measure what each layer of a model costs; compute it for another device; or import what others measured."""
    from autopipe.core import files
    from autopipe.workflow import get_profile

    made, saved = get_profile(
        model,
        origin=origin,
        device=device,
        dtype=dtype,
        devices=devices,
        micro_batches=arguments.numbers(micro_batch, "--micro-batch"),
        threads=threads,
        optimizer=optimizer,
        budget_s=budget,
        output=output,
        progress=progress,
    )
    if as_json:
        print(files.to_json(made), end="")
    else:
        from autopipe.report.terminal import profile_text, show

        show(f"{profile_text(made)}\n\nwrote     {saved}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="model.py, model.py:BUILDER, or a *.profile.json.")],
    global_batch: arguments.GlobalBatch,
    devices: arguments.Devices = None,
    cluster: arguments.Cluster = None,
    memory: arguments.Memory = None,
    micro_batch: arguments.MicroBatch = None,
    depth: Annotated[str | None, typer.Option(metavar="2,4", help="Ranks of the pipeline.")] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="1,2", help="Copies of the pipeline that share the batch; all by default.")
    ] = None,
    unequal_replicas: Annotated[
        bool, typer.Option("--unequal-replicas", help="Also plan stages with replicas of their own; not run.")
    ] = False,
    schedule: arguments.Schedules = None,
    optimizer: arguments.Optimizer = None,
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Update float32 copies of weights of 16 bits.")
    ] = False,
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="Replicas share out the optimizer's state.")
    ] = False,
    recompute: Annotated[Literal["auto", "none", "all"], typer.Option(help="Whose activations to drop.")] = "auto",
    allow_stale: Annotated[
        bool, typer.Option("--allow-stale", help="Also try schedules that train on weights some updates old.")
    ] = False,
    threads: arguments.Threads = 1,
    pin: Annotated[list[str] | None, typer.Option(metavar="LAYER=STAGE", help="Keep a layer on a stage.")] = None,
    budget: arguments.Budget = None,
    like: Annotated[
        str | None, typer.Option("--from", metavar="SPLIT", help="Your split: megatron:…, counts:…, torchtitan:FILE.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan's file.")] = Path("plan.json"),
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Choose cuts, depth, micro-batch and schedule for a model on these devices."""
    from autopipe.core import files, units
    from autopipe.workflow import make_plan

    made = make_plan(
        model,
        global_batch=global_batch,
        devices=devices,
        cluster=cluster,
        micro_batches=arguments.numbers(micro_batch, "--micro-batch"),
        depths=arguments.numbers(depth, "--depth"),
        replicas=arguments.numbers(replicas, "--replicas"),
        schedules=arguments.names(schedule),
        memory_bytes=units.parse_bytes(memory) if memory else None,
        optimizer=optimizer,
        master_weights=master_weights,
        shard_optimizer=shard_optimizer,
        unequal_replicas=unequal_replicas,
        recompute=recompute,
        allow_stale=allow_stale,
        threads=threads,
        pins=dict(map(arguments.pinned, pin)) if pin else None,
        budget_s=budget,
        like=like,
        output=output,
        progress=progress,
    )
    if as_json:
        print(files.to_json(made.plan), end="")
        if made.ours:
            progress(made.comparison)
    else:
        from autopipe.report.terminal import plan_text, show

        said = plan_text(made.plan, profile=made.profile, cluster=made.cluster, folder=output.parent)
        compared = f"\n{made.comparison}" if made.ours else ""
        show(f"{said}{compared}\nwrote     {output}")


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json.")],
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="The model file, if it is not where it was.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="When a rank counts as hung; while it gets ready, 300 s or more."),
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="All ranks on this machine, waiting instead of computing.")
    ] = False,
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Run a plan on local processes and compare: times, memory, losses and gradients."""
    from autopipe.core import files
    from autopipe.workflow import run_check, run_rehearsal

    if emulate:
        from autopipe.report.terminal import rehearsal_text, show

        rehearsed = run_rehearsal(plan, timeout_s=timeout, progress=progress)
        text = f"{rehearsal_text(rehearsed)}\nwrote     {files.rehearsal_path(plan)}"
        print(files.to_json(rehearsed), end="") if as_json else show(text)
        return
    planned, result = run_check(plan, model=model, timeout_s=timeout, progress=progress)
    if as_json:
        print(files.to_json(result), end="")
    else:
        from autopipe.report.terminal import check_text, show

        show(f"{check_text(result, plan=planned)}\nwrote     {files.check_path(plan)}")
    if not result.parity.passed:
        raise typer.Exit(1)


@app.command()
def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="model.py, or model.py:BUILDER.")],
    global_batch: arguments.GlobalBatch,
    devices: arguments.Devices = None,
    budget: Annotated[str, typer.Option(metavar="120s", help="About how long it may take.")] = "120s",
    cluster: arguments.Cluster = None,
    memory: arguments.Memory = None,
    micro_batch: arguments.MicroBatch = None,
    schedule: arguments.Schedules = None,
    optimizer: arguments.Optimizer = None,
    threads: arguments.Threads = 1,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Keeps the trials; plan.tune by default.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The best plan's file.")] = Path("plan.json"),
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Plan, really run the best few plans and their neighbours, and keep the fastest."""
    from autopipe import tuning
    from autopipe.core import files, units

    tuned = tuning.tune(
        model,
        global_batch=global_batch,
        devices=devices,
        budget_s=units.parse_duration(budget),
        cluster=cluster,
        micro_batches=arguments.numbers(micro_batch, "--micro-batch"),
        schedules=arguments.names(schedule),
        memory_bytes=units.parse_bytes(memory) if memory else None,
        optimizer=optimizer,
        threads=threads,
        output=output,
        folder=folder,
        progress=progress,
    )
    if as_json:
        print(files.to_json(tuned.plan), end="")
    else:
        from autopipe.report.terminal import show

        show(f"{tuning.summary(tuned)}\nwrote     {output}")
    if tuned.interrupted:
        say("interrupted")
        raise typer.Exit(130)


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json; plan.check.json beside it is read too.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timelines for Perfetto.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Say what other devices, links or batches would change.")] = False,
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Print a plan, its schedule, and what running it showed; or write it as a page or a trace."""
    from autopipe.core import files
    from autopipe.report import terminal
    from autopipe.workflow import explain_plan, open_plan, origins, write_report, write_trace

    shown, result = open_plan(plan)
    found = origins(plan, shown)
    parts = [
        terminal.plan_text(shown, measured=result, folder=plan.parent),
        terminal.schedule_text(shown.schedule.parsed()),
    ]
    if result:
        parts.append(terminal.check_text(result, plan=shown))
    reason = explain_plan(shown, found) if why else ""
    if why:
        parts.append(terminal.paragraph(reason))
    if html:
        parts.append(f"wrote     {write_report(html, shown, result, found, reason)}")
    if trace:
        parts.append(f"wrote     {write_trace(trace, shown, result)}")
    if as_json:
        content = {"plan": files.as_object(shown), "check": files.as_object(result) if result else None}
        print(files.json_text(content | ({"why": reason} if why else {})), end="")
    else:
        terminal.show("\n\n".join(parts))


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A schedule's name, or a table as a .csv file.")],
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks.")],
    micro_batches: Annotated[int, typer.Option("--micro-batches", min=1, help="How many micro-batches.")],
    stages: Annotated[int | None, typer.Option(min=1, help="How many stages on all ranks together.")] = None,
    forward: Annotated[str | None, typer.Option(metavar="10ms", help="F of a stage and micro-batch.")] = None,
    input_grad: Annotated[str | None, typer.Option(metavar="10ms", help="I of a stage and micro-batch.")] = None,
    weight_grad: Annotated[str | None, typer.Option(metavar="7ms", help="W of a stage and micro-batch.")] = None,
    transfer: Annotated[str | None, typer.Option(metavar="0.5ms", help="From rank to rank; default none.")] = None,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="Seconds stage by stage instead.")] = None,
    memory_cap: Annotated[
        float | None, typer.Option("--memory-cap", min=0, metavar="8", help="Micro-batches' activations of a rank.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the picture.")] = None,
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Explore one schedule: makespan, idle, activations in flight, bound, and the picture."""
    from autopipe.exploring import explore, stage_seconds

    times = (forward, input_grad, weight_grad, transfer)
    seconds = stage_seconds(name, ranks, stages, times, costs)
    explored = explore(name, seconds, ranks=ranks, micro_batches=micro_batches, memory_cap=memory_cap)
    if html:
        from autopipe.core.files import write_text
        from autopipe.report.explored import explored_html

        write_text(explored_html(explored), html)
    if as_json:
        print(explored.to_json(), end="")
    else:
        from autopipe.report.explored import explored_text
        from autopipe.report.terminal import show

        show(f"{explored_text(explored)}\n\nwrote      {html}" if html else explored_text(explored))


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json.")],
    to: Annotated[str, typer.Option(metavar="TRAINER", help="torch, torchtitan, megatron, automodel, deepspeed, …")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the files go.")] = Path(),
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Export what the trainer can express.")] = False,
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Write a plan as another trainer takes it."""
    from autopipe.core import files
    from autopipe.export.writing import export_plan

    made = export_plan(plan, to, output, allow_lossy=allow_lossy)
    if as_json:
        print(files.json_text({"files": list(map(str, made.paths)), "heading": made.heading}), end="")
        return
    from autopipe.report.terminal import show

    show("\n".join([*made.heading, *(f"wrote     {path}" for path in made.paths)]))


@app.command()
def cluster(
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many local devices (2); under torchrun all of its ranks.")
    ] = None,
    threads: arguments.Threads = 1,
    output: Annotated[Path, typer.Option("-o", "--output", help="The cluster's file.")] = Path("cluster.json"),
    as_json: arguments.Json = False,
    debug: arguments.Debug = False,
) -> None:
    """Measure devices and the links between them, here or under torchrun on several hosts."""
    from autopipe.core import files
    from autopipe.workflow import require_folder

    require_folder(output)
    from autopipe.runtime.measuring.links import measure_cluster

    measured = measure_cluster(devices, threads=threads, progress=progress)
    if is_first():
        files.write(measured, output)
    if as_json:
        print(files.to_json(measured), end="")
        return
    from autopipe.report.terminal import cluster_text, show

    show(f"{cluster_text(measured)}\nwrote     {output}")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Plan, run and check pipeline parallelism for an unmodified PyTorch model."""
    if version:
        print(f"autopipe {__version__}")
        raise typer.Exit


def main() -> None:
    """The ``autopipe`` command; never returns."""
    debug = "--debug" in sys.argv[1:]
    given = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the end of the process)
    try:
        code = app(given or ["--help"], prog_name="autopipe", standalone_mode=False)
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(line_of(error))
        sys.exit(error.exit_code if isinstance(error, AutopipeError) else 2)
    if code == 130:
        say("interrupted")
    sys.exit(code)
