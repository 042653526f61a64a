"""Seconds and bytes as people type and read them. The only module that parses or prints units."""

from __future__ import annotations

import math
import re

from autopipe.core.errors import UsageError

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµμ]*)\s*\Z")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def _split(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = _QUANTITY.match(text)
    if match is None or match.group(2) not in units:
        known = ", ".join(units)
        raise UsageError(f"{text!r} is not a {what}: write a number and a unit such as {example} (units: {known})")
    return float(match.group(1)) * units[match.group(2)]


def parse_duration(text: str) -> float:
    """Seconds from text such as ``10ms``, ``0.5 s`` or ``2min``. Raises UsageError without a known unit."""
    return _split(text, _SECONDS, "duration", "10ms")


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``8GiB`` or ``500 MB``. Raises UsageError without a known unit."""
    return round(_split(text, {k: float(v) for k, v in _BYTES.items()}, "size", "8GiB"))


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    """Three significant digits of ``value`` in the largest unit that does not exceed it."""
    factor, unit = next((step for step in steps if abs(value) >= step[0] * 0.9995), steps[-1])
    scaled = value / factor
    rounded = max(abs(float(f"{scaled:.3g}")), 1.0)
    digits = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{scaled:.{digits}f} {unit}"


def format_duration(seconds: float) -> str:
    """``0.00512`` -> ``5.12 ms``."""
    if seconds == 0:
        return "0 ms"
    return _scaled(seconds, _TICKS)


def format_tick(seconds: float, step_s: float) -> str:
    """A mark on an axis whose marks are ``step_s`` apart: ``49.75, 0.05`` -> ``49.75 s``."""
    factor, unit = next((pair for pair in _TICKS if max(seconds, step_s) >= pair[0] * 0.9995), _TICKS[-1])
    digits = max(0, -math.floor(math.log10(step_s / factor) + 1e-9))
    return f"{seconds / factor:.{digits}f} {unit}"


_TICKS = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")]


def format_bytes(size: float) -> str:
    """``3221225472`` -> ``3.00 GiB``."""
    if abs(size) < 1024:
        return f"{round(size)} B"
    return _scaled(size, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")])


def format_bandwidth(bytes_per_s: float) -> str:
    """``12e9`` -> ``12.0 GB/s``."""
    return _scaled(bytes_per_s, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")])


def format_percent(fraction: float, *, sign: bool = False) -> str:
    """``0.237`` -> ``23.7 %``; with ``sign`` -> ``+23.7 %``. What rounds to nothing is ``0.0 %``, never ``-0.0 %``."""
    fraction = 0.0 if abs(fraction) < 0.0005 else fraction
    return f"{fraction * 100:{'+' if sign else ''}.1f} %"


def format_count(number: float) -> str:
    """``774_000_000`` -> ``774 M``."""
    if abs(number) < 1000:
        return f"{round(number)}"
    return _scaled(number, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")])


def many(number: int, what: str) -> str:
    """``1, "micro-batch"`` -> ``1 micro-batch``; ``2, "process"`` -> ``2 processes``."""
    plural = "es" if what.endswith(("s", "ch", "x")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"
