"""What crosses each boundary between stages, by tensor: how much, how often, and how long it is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopipe.core.cluster import Link
from autopipe.core.plan import Plan
from autopipe.core.profile import Edge
from autopipe.core.units import format_bytes, format_duration
from autopipe.report.markup import bar, legend, said, table


class Crossing(NamedTuple):
    """One value over one boundary, for one micro-batch; ``link`` is None inside a rank, ``passed_on`` says that the
    receiving stage does not read it but sends it further."""

    stage: int
    edge: Edge
    forward_bytes: int
    gradient_bytes: int
    link: Link | None
    passed_on: bool


def crossings(plan: Plan) -> Iterator[Crossing]:
    """Every value that crosses, in the order of the boundaries and on the wire."""
    for stage, hop in zip(plan.stages, plan.hops, strict=False):
        following = plan.stages[stage.index + 1]
        for edge in stage.sends:
            size = edge.bytes(plan.micro_batch)
            read = any(following.start <= layer < following.stop for layer in edge.consumers)
            yield Crossing(stage.index, edge, size, size if edge.needs_gradient else 0, hop, not read)


def traffic_section(plan: Plan) -> str:
    """A row a tensor and boundary; bytes of one micro-batch, seconds on the link for its activation and gradient."""
    found = list(crossings(plan))
    if not found:
        return "<p>Nothing: there is one stage.</p>"
    largest = max(each.forward_bytes + each.gradient_bytes for each in found) or 1
    firsts = [i for i, each in enumerate(found) if i and each.stage != found[i - 1].stage]
    headers = ("stages", "tensor", "", "shape", "dtype", "forward", "gradient", "in a step", "on the way")
    rows = []
    for each in found:
        first, name, *cells = map(said, _cells(each, plan.micro_batch, plan.micro_batches))
        rows.append([first, name, _bar(each, largest), *cells])
    note = f"Bytes of one micro-batch of {plan.micro_batch}; {plan.micro_batches} of them in a step, each way."
    return f'<p class="dim">{said(note)}</p>{legend("FB")}' + table(
        headers, rows, left=(0, 4), names=(1, 3), cut_before=firsts
    )


def _cells(each: Crossing, micro_batch: int, micro_batches: int) -> tuple[str, ...]:
    both = each.forward_bytes + each.gradient_bytes
    way = "same rank"
    if each.link:
        way = format_duration(sum(each.link.transfer_s(size) for size in (each.forward_bytes, each.gradient_bytes)))
    return (
        f"{each.stage} → {each.stage + 1}",
        each.edge.name + (" (passed on)" if each.passed_on else ""),
        " × ".join(map(str, each.edge.sizes(micro_batch))) or "scalar",
        each.edge.dtype,
        format_bytes(each.forward_bytes),
        format_bytes(each.gradient_bytes),
        format_bytes(both * micro_batches),
        way,
    )


def _bar(each: Crossing, largest: int) -> str:
    return bar([("F", each.forward_bytes / largest), ("B", each.gradient_bytes / largest)])
