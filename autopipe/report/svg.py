"""The timeline as a picture: a row a rank on a real-time axis, in one SVG that needs nothing else.

    timeline_svg(predicted)                                   one lane a rank
    timeline_svg(predicted, measured, limits=(2**33, 2**33))  two lanes, and memory against its limit

The upper lane is predicted, the lower one measured. Forward is blue and plain, backward orange and hatched, the input
gradient light orange and hatched the other way, the weight gradient green and dotted, the optimizer violet and barred,
idle grey; stages of one rank differ in shade; and each span that is wide enough says which action it is, so nothing
hangs on colour alone. Hovering a span names it with its times. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate

from autopipe.core.schedule import Op
from autopipe.core.timeline import Span, Timeline
from autopipe.core.units import format_bytes, format_count, format_duration, format_tick
from autopipe.report.panels import MOST_SPANS, Panel, panels

WIDTH = 1100
_GUTTER, _RIGHT, _TOP, _BETWEEN = 118.0, 12.0, 58.0, 30.0
_LANE, _SPACE, _MEMORY, _ROW = 18.0, 3.0, 34.0, 14.0
_LETTER = 5.8
"""Pixels that a letter of a span's label takes."""
_TICKS = 8
_OFF_SCALE = 4.0
"""A limit of more than so many peaks is not drawn to scale: the curve would lie flat on the ground."""

NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient", Op.O: "optimizer"}
_COLOURS = {Op.F: "8ab4f0", Op.B: "f5a25d", Op.I: "fbd08a", Op.W: "8fd19e", Op.O: "c6b5e8"}
_TEXTURES = {
    Op.F: "",
    Op.B: "M-1 1l2-2M0 6l6-6M5 7l2-2",
    Op.I: "M-1 5l2 2M0 0l6 6M5-1l2 2",
    Op.W: "M1 1h1.2M4 4h1.2",
    Op.O: "M2 0v6M5 0v6",
}
_SHADES = (0.0, 0.45, 0.25, 0.65)
"""How much white is mixed into the colour, by the stage's place among those of its rank."""

_STYLE = """
.tl text{font:11px system-ui,sans-serif;fill:#1f2328}
.tl .paper{fill:#fff}.tl .idle{fill:#e4e6ea}.tl .grid{stroke:#d0d4da;fill:none}
.tl .s{stroke:#fff;stroke-width:.6}.tl .s:hover,.tl .s.on{stroke:#000;stroke-width:2}
.tl .in{font-size:10px;fill:#14171a;text-anchor:middle;pointer-events:none}
.tl .dim{fill:#59636e;font-size:10px}.tl .name{font-weight:600}
.tl .held{fill:#b9c2cf;stroke:#59636e}.tl .limit{stroke:#c0262d;stroke-dasharray:5 3;stroke-width:1.4;fill:none}
.tl .peak{stroke:#1f2328;stroke-dasharray:1.5 2.5;stroke-width:1.4;fill:none}
@media screen and (prefers-color-scheme:dark){
.tl text{fill:#e6e8eb}.tl .paper{fill:#15181c}.tl .idle{fill:#2b3038}.tl .grid{stroke:#3a414b}
.tl .s{stroke:#15181c}.tl .s:hover,.tl .s.on{stroke:#fff}.tl .in{fill:#14171a}.tl .dim{fill:#a3adb8}
.tl .held{fill:#4a5361;stroke:#a3adb8}.tl .limit{stroke:#ff7b7b}.tl .peak{stroke:#e6e8eb}}
"""


def timeline_svg(
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    limits: Sequence[int] = (),
    title: str = "Timeline of one step",
    width: int = WIDTH,
    key: str = "timeline",
) -> str:
    """One step as an SVG element, with its style in it: a file of its own, or a part of an HTML page.

    ``limits`` are bytes a rank, drawn as dashed lines. ``key`` begins the ids in it: give each picture on a page its
    own. Of more than about 5,000 spans the warm-up, one steady period and the drain are drawn, and the picture says so.
    """
    picture = _Picture(predicted, measured, tuple(limits), width, key)
    heading = f"{key}-title"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_n(picture.height)}" class="tl" '
        f'role="img" aria-labelledby="{heading} {key}-desc">',
        f'<title id="{heading}">{escape(title)}</title><desc id="{key}-desc">{escape(picture.description)}</desc>',
        f"<style>{_STYLE}</style><defs>{''.join(picture.patterns())}</defs>",
        f'<rect class="paper" width="{width}" height="{_n(picture.height)}"/>',
        f'<g class="plot" transform="translate({_n(_GUTTER)} 0)">{"".join(picture.plot())}</g>',
        f'<g class="gutter"><rect class="paper" width="{_n(_GUTTER - 4)}" height="{_n(picture.height)}"/>',
        f"{''.join(picture.gutter())}</g>",
        f'<g class="key">{"".join(picture.legend())}</g>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, eq=False)
class _Picture:
    """Where everything goes. x counts from the gutter's right edge."""

    predicted: Timeline
    measured: Timeline | None
    limits: tuple[int, ...]
    width: int
    key: str

    @cached_property
    def lines(self) -> tuple[Timeline, ...]:
        """The timelines, a lane each."""
        return (self.predicted,) if self.measured is None else (self.predicted, self.measured)

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The stretches of the predicted step that are drawn."""
        if sum(len(line.spans) for line in self.lines) <= MOST_SPANS:
            return (Panel("", 0.0, self.predicted.step_s),)
        return panels(self.predicted, MOST_SPANS // len(self.lines))

    @property
    def description(self) -> str:
        """What the picture shows, in words: for those who cannot see it, and for a step that is drawn in parts."""
        steps = " and ".join(f"{line.origin} {format_duration(line.step_s)}" for line in self.lines)
        said = f"{self.predicted.ranks} ranks, step {steps}"
        if self.panels[0].name:
            drawn = ", ".join(panel.name for panel in self.panels)
            total = sum(len(line.spans) for line in self.lines)
            said += f"; drawn are {drawn} of {format_count(total)} spans"
        return said

    def ratio(self, line: Timeline) -> float:
        """How much longer a timeline's step is than the predicted one."""
        return line.step_s / self.predicted.step_s if self.predicted.step_s else 1.0

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """How long each panel is for the slowest timeline."""
        longest = max(map(self.ratio, self.lines))
        return tuple(panel.seconds * longest for panel in self.panels)

    @cached_property
    def gaps(self) -> tuple[float, ...]:
        """The room behind each panel but the last: more where its name is longer than itself."""
        whole = self.width - _GUTTER - _RIGHT - _BETWEEN * (len(self.panels) - 1)
        widths = [whole * seconds / max(sum(self.seconds), 1e-12) for seconds in self.seconds]
        return tuple(
            max(_BETWEEN, 7 * len(panel.name) - wide + 8) for panel, wide in zip(self.panels[:-1], widths, strict=False)
        )

    @cached_property
    def scale(self) -> float:
        """Pixels a second."""
        return (self.width - _GUTTER - _RIGHT - sum(self.gaps)) / max(sum(self.seconds), 1e-12)

    @cached_property
    def lefts(self) -> tuple[float, ...]:
        """Where each panel begins."""
        widths = (seconds * self.scale + gap for seconds, gap in zip(self.seconds, self.gaps, strict=False))
        return tuple(accumulate(widths, initial=0.0))

    @cached_property
    def has_memory(self) -> bool:
        """Whether there is any memory curve to draw."""
        return any(self.predicted.peak_bytes)

    @property
    def row_height(self) -> float:
        """What one rank takes."""
        lanes = len(self.lines) * (_LANE + _SPACE)
        return lanes + (_MEMORY if self.has_memory else 0.0) + _ROW

    @property
    def height(self) -> float:
        """The picture's height."""
        return _TOP + self.row_height * self.predicted.ranks + 6

    def row(self, rank: int) -> float:
        """The upper edge of a rank's row."""
        return _TOP + rank * self.row_height

    @cached_property
    def chunks(self) -> dict[int, int]:
        """The place of each stage among those of its rank."""
        owned: dict[int, set[int]] = {}
        for span in self.predicted.spans:
            owned.setdefault(span.rank, set()).add(span.action.stage)
        return {stage: place for stages in owned.values() for place, stage in enumerate(sorted(stages))}

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The operations that occur."""
        return tuple(op for op in Op if any(span.action.op is op for line in self.lines for span in line.spans))

    def fill(self, op: Op, shade: int) -> str:
        """The id of a pattern."""
        return f"{self.key}-{op.value}{shade}"

    def patterns(self) -> Iterator[str]:
        """A fill for each operation and shade that occurs."""
        shades = sorted({chunk % len(_SHADES) for chunk in self.chunks.values()} | {0})
        for op in self.ops:
            for shade in shades:
                texture = f'<path d="{_TEXTURES[op]}" stroke="#000" stroke-opacity=".28"/>' if _TEXTURES[op] else ""
                yield (
                    f'<pattern id="{self.fill(op, shade)}" width="6" height="6" patternUnits="userSpaceOnUse">'
                    f'<rect width="6" height="6" fill="#{_lighter(_COLOURS[op], _SHADES[shade])}"/>{texture}</pattern>'
                )

    # what is drawn, from the back to the front

    def plot(self) -> Iterator[str]:
        """All that lies on the time axis."""
        yield from self._axis()
        for rank in range(self.predicted.ranks):
            for number, line in enumerate(self.lines):
                yield from self._lane(rank, line, self._rows[number][rank], self.row(rank) + number * (_LANE + _SPACE))
            if self.has_memory:
                yield from self._memory(rank, self.row(rank) + len(self.lines) * (_LANE + _SPACE))

    def _axis(self) -> Iterator[str]:
        bottom = _n(self.height - 8)
        for panel, left in zip(self.panels, self.lefts, strict=True):
            for tick_s in _ticks(panel, self._tick_s):
                x = _n(left + (tick_s - panel.start_s) * self.scale)
                yield f'<path class="grid" d="M{x} {_n(_TOP - 6)}V{bottom}"/>'
                yield f'<text class="dim tick" x="{x}" y="{_n(_TOP - 10)}">{format_tick(tick_s, self._tick_s)}</text>'
            if panel.name:
                yield f'<text class="name" x="{_n(left)}" y="{_n(_TOP - 24)}">{panel.name}</text>'

    @cached_property
    def _tick_s(self) -> float:
        """Seconds between two ticks: 1, 2 or 5 times a power of ten."""
        about = max(sum(panel.seconds for panel in self.panels) / _TICKS, 1e-12)
        power = 10.0 ** math.floor(math.log10(about))
        return next(step * power for step in (1, 2, 5, 10) if step * power >= about * 0.999)

    @cached_property
    def _rows(self) -> list[list[list[Span]]]:
        """Each timeline's spans by rank."""
        rows: list[list[list[Span]]] = [[[] for _ in range(self.predicted.ranks)] for _ in self.lines]
        for line, row in zip(self.lines, rows, strict=True):
            for span in line.spans:
                row[span.rank].append(span)
        return rows

    def _lane(self, rank: int, line: Timeline, spans: Sequence[Span], top: float) -> Iterator[str]:
        ratio = self.ratio(line)
        yield f'<g class="lane" transform="translate(0 {_n(top)})" data-rank="{rank}" data-origin="{line.origin}">'
        for panel, left in zip(self.panels, self.lefts, strict=True):
            start_s, stop_s = panel.start_s * ratio, panel.stop_s * ratio
            yield f'<path class="idle" d="{self._box(left, 0.0, (stop_s - start_s) * self.scale)}"/>'
            for span in spans:
                if span.end_s > start_s and span.start_s < stop_s:
                    yield from self._span(span, left, start_s, stop_s)
        yield "</g>"

    def _span(self, span: Span, left: float, start_s: float, stop_s: float) -> Iterator[str]:
        """A span, cut off at its panel's edges; its label where that fits."""
        begin, end = max(span.start_s, start_s), min(span.end_s, stop_s)
        x, wide = left + (begin - start_s) * self.scale, (end - begin) * self.scale
        action = span.action
        fill = self.fill(action.op, self.chunks.get(action.stage, 0) % len(_SHADES))
        times = f"{format_duration(span.start_s)} to {format_duration(span.end_s)}"
        yield f'<path class="s" fill="url(#{fill})" d="{self._box(x, 0.0, wide)}">'
        yield f"<title>{action} {times}, {format_duration(span.end_s - span.start_s)}</title></path>"
        label = next((text for text in labels(span) if len(text) * _LETTER + 3 <= wide), "")
        if label:
            yield f'<text class="in" x="{_n(x + wide / 2)}" y="12.5">{label}</text>'

    def _box(self, x: float, y: float, wide: float, high: float = _LANE) -> str:
        return f"M{_n(x)} {_n(y)}h{_n(wide)}v{_n(high)}H{_n(x)}z"

    def _memory(self, rank: int, top: float) -> Iterator[str]:
        """The predicted curve, the measured peak, the limit."""
        found = self.measured.peak_bytes[rank] if self.measured else 0
        limit, shown = self._limit(rank), self._limit(rank) if self._to_scale(rank) else 0
        unit = (_MEMORY - 6) / max(self._highest(rank), shown, 1)
        yield f'<g class="memory" transform="translate(0 {_n(top)})">'
        for panel, left in zip(self.panels, self.lefts, strict=True):
            right = _n(left + panel.seconds * self.scale)
            yield f'<path class="held" d="{self._curve(rank, panel, left, unit)}"><title>{self._memory_said(rank)}'
            yield "</title></path>"
            if found:
                yield f'<path class="peak" d="M{_n(left)} {_n(_MEMORY - found * unit)}H{right}"/>'
            if limit:
                y = _MEMORY - limit * unit if shown else 2.0
                yield f'<path class="limit" d="M{_n(left)} {_n(y)}H{right}"/>'
        yield "</g>"

    def _highest(self, rank: int) -> int:
        return max(line.peak_bytes[rank] for line in self.lines)

    def _to_scale(self, rank: int) -> bool:
        return self._limit(rank) <= _OFF_SCALE * self._highest(rank)

    def _limit(self, rank: int) -> int:
        return self.limits[rank] if rank < len(self.limits) else 0

    def _memory_said(self, rank: int) -> str:
        said = f"rank {rank}: at most {format_bytes(self.predicted.peak_bytes[rank])} predicted"
        if self.measured:
            said += f", {format_bytes(self.measured.peak_bytes[rank])} measured"
        return said + (f", limit {format_bytes(self._limit(rank))}" if self._limit(rank) else "")

    def _curve(self, rank: int, panel: Panel, left: float, unit: float) -> str:
        """A stair of the bytes that are held."""
        points = self.predicted.memory[rank]
        before = [point.bytes for point in points if point.time_s <= panel.start_s]
        path = [f"M{_n(left)} {_n(_MEMORY)}V{_n(_MEMORY - (before[-1] if before else 0) * unit)}"]
        for time_s, size in points:
            if panel.start_s < time_s < panel.stop_s:
                path.append(f"H{_n(left + (time_s - panel.start_s) * self.scale)}V{_n(_MEMORY - size * unit)}")
        path.append(f"H{_n(left + panel.seconds * self.scale)}V{_n(_MEMORY)}z")
        return "".join(path)

    # what stands beside the plot

    def gutter(self) -> Iterator[str]:
        """The rows' names."""
        for rank in range(self.predicted.ranks):
            top = self.row(rank)
            yield f'<text class="name" x="8" y="{_n(top + 12.5)}">rank {rank}</text>'
            for number, line in enumerate(self.lines):
                y = _n(top + 12.5 + number * (_LANE + _SPACE))
                yield f'<text class="dim" x="{_n(_GUTTER - 8)}" y="{y}" text-anchor="end">{line.origin}</text>'
            if self.has_memory:
                yield from self._memory_name(rank, top + len(self.lines) * (_LANE + _SPACE))

    def _memory_name(self, rank: int, top: float) -> Iterator[str]:
        peak, limit = self.predicted.peak_bytes[rank], self._limit(rank)
        yield f'<text class="dim" x="8" y="{_n(top + 14)}">memory {format_bytes(peak)}</text>'
        if limit:
            how = "" if self._to_scale(rank) else " (cut off)"
            yield f'<text class="dim" x="8" y="{_n(top + 27)}">of {format_bytes(limit)}{how}</text>'

    def legend(self) -> Iterator[str]:
        """What the fills and lines mean."""
        x = 8.0
        for op in self.ops:
            yield f'<path class="s" fill="url(#{self.fill(op, 0)})" d="{self._box(x, 8.0, 18.0, 12.0)}"/>'
            yield f'<text x="{_n(x + 23)}" y="18">{NAMES[op]}</text>'
            x += 40 + 6.2 * len(NAMES[op])
        lines = [("held", "memory", True), ("peak", "measured peak", self.measured), ("limit", "limit", self.limits)]
        yield f'<path class="idle" d="{self._box(x, 8.0, 18.0, 12.0)}"/><text x="{_n(x + 23)}" y="18">idle</text>'
        x += 66
        for name, text, there in lines:
            if self.has_memory and there:
                shape = self._box(x, 12.0, 18.0, 8.0) if name == "held" else f"M{_n(x)} 14h18"
                yield f'<path class="{name}" d="{shape}"/><text x="{_n(x + 23)}" y="18">{text}</text>'
                x += 42 + 6.4 * len(text)


def labels(span: Span) -> tuple[str, str, str]:
    """What a span may be called, from the longest: ``2F13``, ``F13``, ``13``; an optimizer step ``O``."""
    _, op, batch = span.action
    return ("O", "O", "O") if op is Op.O else (str(span.action), f"{op.value}{batch}", str(batch))


def _ticks(panel: Panel, every_s: float) -> Iterator[float]:
    for number in range(math.ceil(panel.start_s / every_s - 1e-9), math.floor(panel.stop_s / every_s + 1e-9) + 1):
        yield number * every_s


def _lighter(colour: str, white: float) -> str:
    """The colour with a part of white mixed in."""
    parts = (int(colour[i : i + 2], 16) for i in (0, 2, 4))
    return "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _n(value: float) -> str:
    """A coordinate in as few letters as a hundredth of a pixel takes."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
