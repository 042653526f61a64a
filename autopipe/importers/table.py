"""A table of layers as people keep it in a spreadsheet, saved as CSV (comma, semicolon or tab).

    layer,forward_ms,backward_ms,output_MB,parameters
    embed,0.2,0.4,16.8,51463168
    block0,1.9,3.8,16.8,12596224

A row is a layer, in execution order. A column's unit ends its name, in whatever form: ``forward_ms``,
``forward (ms)``, ``output [MiB]``. ``parameters`` without a unit is their number. ``held`` (bytes kept for the
backward, else the output), ``workspace``, ``optimizer`` and ``micro_batch`` (several sizes in one file) may be there.
Each layer's output goes to the next layer.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.core.errors import FileError, UsageError
from autopipe.core.profile import DTYPE_BYTES, CostTable, Edge, Layer, LayerCost, Profile
from autopipe.core.units import parse_bytes, parse_duration
from autopipe.importers.facts import Facts, shape_of

_NAMES = {
    "layer": ("layer", "name", "module"),
    "forward": ("forward", "fwd"),
    "backward": ("backward", "bwd"),
    "output": ("output", "activation", "activations"),
    "parameters": ("parameters", "parameter", "params", "weights"),
    "held": ("held", "saved"),
    "workspace": ("workspace",),
    "optimizer": ("optimizer",),
    "micro_batch": ("micro_batch", "microbatch", "batch", "batch_size"),
}
_NEEDED = ("layer", "forward", "backward", "output", "parameters")
_TIMES = ("forward", "backward", "optimizer")
_UNITS = {"seconds": "s", "sec": "s", "bytes": "B"}
NOTES = ("the table has no halves of the backward: no schedule may split it",)


@dataclass(frozen=True)
class Column:
    """A column of the table: what it holds, its place, its header and the unit that the header ends in."""

    what: str
    place: int
    header: str
    unit: str


@dataclass
class Row:
    """A layer's figures by micro-batch size, in seconds and bytes."""

    name: str
    parameters: int
    parameter_bytes: int
    costs: dict[int, LayerCost] = field(default_factory=dict)


def read(text: str, facts: Facts) -> Profile:
    """The Profile of a table. Raises FileError that names line and column, UsageError for a fact that is missing."""
    lines = text.lstrip("\ufeff").splitlines()
    head = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t", key=head.count)
    records = [(n, r) for n, r in enumerate(csv.reader(lines, delimiter=delimiter), 1) if any(map(str.strip, r))]
    if len(records) < 2:
        raise FileError(f"{facts.path} has no layers: it needs a header and a row a layer")
    columns = _columns(records[0][1], facts.path)
    device = facts.needed_device()
    rows: dict[str, Row] = {}
    for number, record in records[1:]:
        _add(rows, columns, record, f"{facts.path}, line {number}", facts)
    return _profile(list(rows.values()), device, facts)


def _columns(header: Sequence[str], path: str) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for place, text in enumerate(header):
        words = [word for word in re.split(r"[\s_()\[\]]+", text.strip()) if word]
        for count in (len(words), len(words) - 1):
            what = _meaning("_".join(words[:count]).lower())
            if what and what not in found:
                unit = "".join(words[count:])
                found[what] = Column(what, place, text.strip(), _UNITS.get(unit.lower(), unit))
    missing = [what for what in _NEEDED if what not in found]
    if missing:
        raise FileError(f"{path} has no column {', '.join(missing)}: its header is {', '.join(map(str.strip, header))}")
    for column in found.values():
        if not column.unit and column.what not in ("layer", "parameters", "micro_batch"):
            example = "ms" if column.what in _TIMES else "MB"
            raise FileError(f"{path}: column {column.header!r} has no unit: call it {column.header}_{example}")
    return found


def _meaning(words: str) -> str | None:
    return next((what for what, names in _NAMES.items() if words in names), None)


def _add(rows: dict[str, Row], columns: Mapping[str, Column], record: Sequence[str], where: str, facts: Facts) -> None:
    """Add a line of the file to the rows."""
    cells = {what: record[c.place].strip() if c.place < len(record) else "" for what, c in columns.items()}
    if not cells["layer"]:
        raise FileError(f"{where} has no name in column {columns['layer'].header!r}")

    def number(what: str) -> float:
        column = columns.get(what)
        if column is None:
            return 0.0
        try:
            if not column.unit:
                return float(int(cells[what]))
            parse = parse_duration if what in _TIMES else parse_bytes
            return parse(f"{cells[what]} {column.unit}")
        except (ValueError, UsageError):
            raise FileError(f"{where}: {cells[what]!r} in column {column.header!r} is no figure in its unit") from None

    batch = int(number("micro_batch")) if "micro_batch" in columns else facts.needed_micro_batch()
    row = rows.setdefault(cells["layer"], _row(cells["layer"], number("parameters"), columns["parameters"], facts))
    if batch < 1 or batch in row.costs:
        again = "is there twice" if batch in row.costs else "needs a micro-batch of 1 or more"
        raise FileError(f"{where}: layer {row.name} {again}")
    output = int(number("output"))
    row.costs[batch] = LayerCost(
        forward_s=number("forward"),
        backward_s=number("backward"),
        input_grad_s=number("backward"),
        weight_grad_s=0.0,
        held_after_forward_bytes=int(number("held")) if "held" in columns else output,
        held_after_input_grad_bytes=0,
        output_bytes=output,
        workspace_bytes=int(number("workspace")),
        optimizer_s=number("optimizer"),
    )


def _row(name: str, parameters: float, column: Column, facts: Facts) -> Row:
    each = DTYPE_BYTES[facts.dtype]
    if column.unit:
        return Row(name, int(parameters) // each, int(parameters))
    return Row(name, int(parameters), int(parameters) * each)


def _profile(rows: Sequence[Row], device: str, facts: Facts) -> Profile:
    sizes = sorted(rows[0].costs)
    for row in rows:
        if sorted(row.costs) != sizes:
            raise FileError(f"{facts.path}: layer {row.name} has micro-batches {sorted(row.costs)}, the first {sizes}")
    name = facts.path.rpartition("/")[2]
    return Profile(
        model=name.rpartition(".")[0] or name,
        layers=tuple(Layer(r.name, r.parameter_bytes, r.parameters, can_split_backward=False) for r in rows),
        edges=tuple(_edge(index, row, facts) for index, row in enumerate(rows[:-1])),
        costs=tuple(CostTable(size, tuple(row.costs[size] for row in rows)) for size in sizes),
        device=device,
        dtype=facts.dtype,
        origin="imported",
        sources=(f"table {name}",),
        notes=NOTES,
    )


def _edge(index: int, row: Row, facts: Facts) -> Edge:
    sizes = {batch: cost.output_bytes for batch, cost in row.costs.items()}
    shape = shape_of(sizes, facts.dtype)
    if shape is None:
        raise FileError(
            f"{facts.path}: the output of layer {row.name} is {sizes} bytes at these micro-batches: it must be the "
            f"same at all, or grow with the micro-batch"
        )
    return Edge(row.name, index, (index + 1,), *shape)
