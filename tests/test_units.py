from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core import units
from autopipe.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10ms", 0.01), ("0.5 s", 0.5), ("2min", 120), ("14µs", 14e-6), ("14 us", 14e-6), ("1h", 3600), (".5s", 0.5)],
)
def test_durations(text, seconds):
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("500 MB", 500 * 10**6), ("1.5KiB", 1536), ("12B", 12), ("1e3 kB", 10**6)],
)
def test_sizes(text, size):
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8", "GiB", "8 gib", "-1GiB", "nanGiB", "8GiB of memory", "8GB/s", "1,5GiB"])
def test_a_size_without_a_known_unit_is_refused(text):
    with pytest.raises(UsageError, match="8GiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize("parse", [units.parse_duration, units.parse_bytes])
def test_every_refusal_shows_the_text_and_the_units(parse):
    with pytest.raises(UsageError, match=r"'7 parsecs' .*units: "):
        parse("7 parsecs")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.00512, "5.12 ms"), (0.0099996, "10.0 ms"), (1, "1.00 s"), (0.9996, "1.00 s"), (14e-6, "14.0 µs")],
)
def test_printed_durations(seconds, text):
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**30, "3.00 GiB"), (2**30 - 1, "1.00 GiB")],
)
def test_printed_sizes(size, text):
    assert units.format_bytes(size) == text


def test_printed_counts_and_percents():
    assert units.format_count(774_000_000) == "774 M"
    assert units.format_count(999) == "999"
    assert units.format_percent(0.237) == "23.7 %"
    assert units.format_percent(0.0123, sign=True) == "+1.2 %"
    assert units.format_percent(-0.0123, sign=True) == "-1.2 %"
    assert units.format_percent(-1e-9) == "0.0 %"
    assert units.format_bandwidth(12e9) == "12.0 GB/s"


@given(st.floats(min_value=1e-9, max_value=1e5))
def test_a_printed_duration_reads_back_to_three_digits(seconds):
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, rel=5.1e-3)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_printed_size_reads_back_to_three_digits(size):
    assert units.parse_bytes(units.format_bytes(size)) == pytest.approx(size, rel=5.1e-3)


@given(st.floats(min_value=1e3, max_value=1e15))
def test_a_printed_bandwidth_reads_back_to_three_digits(rate):
    size, slash, second = units.format_bandwidth(rate).partition("/")
    assert (slash, second) == ("/", "s")
    assert units.parse_bytes(size) == pytest.approx(rate, rel=5.1e-3)


@pytest.mark.parametrize(
    ("seconds", "step_s", "text"),
    [
        (0.0, 0.02, "0 ms"),
        (0.12, 0.02, "120 ms"),
        (0.5, 0.5, "500 ms"),
        (1.5, 0.5, "1.5 s"),
        (49.75, 0.05, "49.75 s"),
        (2e-6, 5e-7, "2.0 µs"),
        (3.0, 1.0, "3 s"),
    ],
)
def test_a_tick_has_the_digits_that_tell_it_from_the_next(seconds, step_s, text):
    assert units.format_tick(seconds, step_s) == text


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (0, "process", "0 processes"),
        (1, "rank", "1 rank"),
        (3, "tied parameter", "3 tied parameters"),
    ],
)
def test_one_thing_is_not_several(number, what, text):
    assert units.many(number, what) == text
