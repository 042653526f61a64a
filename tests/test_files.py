from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.errors import FileError
from autopipe.core.plan import Plan, Rejected
from autopipe.core.profile import CostTable, Edge, Layer, LayerCost, Profile, Tie
from autopipe.core.result import CheckResult, Parity
from autopipe.core.schedule import Action, Op
from autopipe.core.timeline import Memory, Span, Timeline
from tests.samples import check_result, cluster, plan, profile

SAMPLES = [plan(), profile(), cluster(), check_result(), check_result().timeline]
EACH = pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)

seconds = st.floats(min_value=0, max_value=1e6)
sizes = st.integers(min_value=0, max_value=2**60)
counts = st.integers(min_value=1, max_value=4)
names = st.text(max_size=8)
actions = st.builds(Action, st.integers(0, 9), st.sampled_from(Op), st.integers(0, 99))


def rows(of, **bounds):
    return st.lists(of, **bounds).map(tuple)


links = st.builds(Link, seconds, st.floats(min_value=1, max_value=1e15))
devices = st.builds(Device, names, st.integers(1, 2**50), counts, st.floats(min_value=0.1, max_value=10))
clusters = st.builds(
    Cluster, names, rows(devices, min_size=1, max_size=3), links.map(lambda link: (Tier("t", 12, link),)), origin=names
)
costs = st.builds(LayerCost, *[seconds] * 4, *[sizes] * 4, seconds, seconds)
timelines = st.builds(
    Timeline,
    counts,
    rows(st.builds(Span, st.integers(0, 3), actions, seconds, seconds), max_size=5),
    rows(rows(st.builds(Memory, seconds, sizes), max_size=3), max_size=3),
    seconds,
    names,
)


@st.composite
def profiles(draw):
    layers = tuple(draw(st.builds(Layer, names, sizes, sizes, rows(names, max_size=2))) for _ in range(draw(counts)))
    numbers = st.integers(0, len(layers) - 1)
    shapes = rows(st.integers(0, 99) | st.just("b") | counts.map("{}*b".format), max_size=3)
    edge = st.builds(
        Edge, names, st.none() | numbers, rows(numbers, max_size=2), shapes, st.sampled_from(["int64", "bool"])
    )
    table = st.builds(CostTable, counts, st.tuples(*[costs] * len(layers)))
    tie = st.builds(Tie, names, rows(numbers, min_size=1, max_size=2), sizes)
    return Profile(
        draw(names),
        layers,
        draw(rows(edge, max_size=3)),
        draw(rows(table, max_size=2)),
        "cpu",
        "float32",
        ties=draw(rows(tie, max_size=2)),
        noise=draw(seconds),
        versions=draw(st.dictionaries(names, names, max_size=2)),
    )


rejections = st.builds(Rejected, names, names, st.none() | seconds, st.none() | seconds, st.none() | sizes)
plans = st.builds(
    lambda rejected, notes, provenance, step_s, recompute: replace(
        plan(),
        rejected=rejected,
        notes=notes,
        provenance=provenance,
        lower_bound_s=step_s,
        stages=tuple(replace(stage, recompute=recompute) for stage in plan().stages),
    ),
    rows(rejections, max_size=3),
    rows(names, max_size=2),
    st.dictionaries(names, names, max_size=2),
    seconds,
    rows(names, max_size=2),
)
parities = st.builds(Parity, st.booleans(), seconds, seconds, rows(seconds, max_size=3), rows(seconds), seconds, names)
checks = st.builds(
    lambda parity, timeline, error: replace(check_result(), parity=parity, timeline=timeline, error=error),
    parities,
    timelines,
    st.floats(min_value=-1, max_value=10),
)


@given(profiles() | clusters | timelines | plans | checks)
def test_a_file_reads_back_as_it_was_written(value):
    text = files.to_json(value)
    assert files.from_json(text, type(value)) == value
    assert files.to_json(files.from_json(text, type(value))) == text


@EACH
def test_a_file_on_disk_reads_back(value, tmp_path):
    files.write(value, tmp_path / "file.json")
    assert files.read(tmp_path / "file.json", type(value)) == value
    assert os.listdir(tmp_path) == ["file.json"]


@EACH
def test_a_file_cut_short_is_refused(value):
    text = files.to_json(value).rstrip()
    for end in range(0, len(text), max(1, len(text) // 97)):
        with pytest.raises(FileError, match=r"file\.json is not whole JSON \(line \d+, column \d+"):
            files.from_json(text[:end], type(value), "file.json")


def places(content, path=()):
    """Every place in nested JSON."""
    yield path
    if isinstance(content, dict | list):
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(item, (*path, key))


def at(content, path):
    for key in path:
        content = content[key]
    return content


def changed(content, path, value):
    copy = json.loads(json.dumps(content))
    at(copy, path[:-1])[path[-1]] = value
    return json.dumps(copy)


FREE = ("versions", "provenance")  # mappings from any text to any text


def fits(other, before, path):
    """Whether the value may stand there: of the same type, a whole number for a fraction, or where None is allowed."""
    if type(other) is type(before) and (path[0] in FREE or not isinstance(before, dict | list)):
        return True
    return (other == [None] and path[-1] in ("hops", "losses", "reference_losses")) or (
        isinstance(other, str) and "shape" in path
    )


@EACH
def test_every_value_of_another_type_is_refused(value):
    content = json.loads(files.to_json(value))
    for path in places(content):
        before = at(content, path)
        if not path or before is None:
            continue
        for other in ({}, {"x": 1}, "text", True, 1.5, [None]):
            if not fits(other, before, path):
                with pytest.raises(FileError, match=r"^file\.json"):
                    refuse(changed(content, path, other), type(value), f"{path}: {other!r} for {before!r}")


def refuse(text, kind, what):
    files.from_json(text, kind, "file.json")
    pytest.fail(f"taken: {what}")


@EACH
def test_an_unknown_field_is_refused_wherever_it_is(value):
    content = json.loads(files.to_json(value))
    for path in places(content):
        if isinstance(at(content, path), dict) and not (path and path[0] in FREE):
            text = changed(content, (*path, "mispelt"), 1)
            where = r"\$[.\[]\S+: " if path else ""
            with pytest.raises(FileError, match=rf"^file\.json: {where}unknown field 'mispelt'$"):
                files.from_json(text, type(value), "file.json")


def error_of(text, kind):
    try:
        files.from_json(text, kind, "file.json")
    except FileError as error:
        return str(error)
    return ""


@EACH
def test_a_missing_field_is_refused_or_has_a_default(value):
    content = json.loads(files.to_json(value))
    refused = 0
    for key in content:
        text = json.dumps({k: v for k, v in content.items() if k != key})
        message = error_of(text, type(value))
        if message:
            assert key in message
            refused += 1
    assert refused >= 4


@EACH
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(value, number):
    content = json.loads(files.to_json(value))
    numbers = [path for path in places(content) if isinstance(at(content, path), float)]
    assert numbers
    for path in numbers:
        text = changed(content, path, "HERE").replace('"HERE"', number)
        with pytest.raises(FileError, match=r"\$.* must be a finite number"):
            files.from_json(text, type(value), "file.json")


@EACH
def test_negative_times_and_sizes_are_refused_with_their_path(value):
    content = json.loads(files.to_json(value))
    quantities = [
        path
        for path in places(content)
        if type(at(content, path)) in (int, float)
        and str(next(key for key in reversed(path) if isinstance(key, str))).endswith(("_s", "_bytes", "memory"))
    ]
    assert quantities
    for path in quantities:
        with pytest.raises(FileError, match=rf"\$\.{path[0]}.* is -1, it cannot be negative"):
            files.from_json(changed(content, path, -1), type(value), "file.json")


@EACH
@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"version": 2}, r"has version 2, this autopipe reads up to 1: install a newer one"),
        ({"version": 0}, r"version 0"),
        ({"version": "1"}, r"version '1'"),
        ({"version": True}, r"version True"),
        ({"format": "autopipe.other"}, r"has format 'autopipe.other', 'autopipe\.\w+' is needed"),
        ({"format": None}, r"format None"),
    ],
)
def test_other_formats_and_versions_are_refused(value, head, message):
    text = json.dumps(json.loads(files.to_json(value)) | head)
    with pytest.raises(FileError, match=message):
        files.from_json(text, type(value), "file.json")


def test_one_format_is_not_taken_for_another():
    for value in SAMPLES:
        for kind in {Plan, Profile, Cluster, CheckResult, Timeline} - {type(value)}:
            with pytest.raises(FileError, match="is needed"):
                files.from_json(files.to_json(value), kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not whole JSON"),
        ("[]", "holds a list, not an object"),
        ("null", "holds a NoneType"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "format None"),
        (f'{{"format": "autopipe.cluster", "version": {"9" * 5000}}}', "cannot be read"),
    ],
    ids=["empty", "list", "null", "deep list", "deep object", "long number"],
)
def test_text_that_is_no_file_at_all_is_refused(text, message):
    with pytest.raises(FileError, match=message):
        files.from_json(text, Cluster, "file.json")


@pytest.mark.parametrize("depth", [300, 900])
def test_deep_nesting_under_a_right_head_is_refused(depth):
    inner = '{"a":' * depth + "1" + "}" * depth
    with pytest.raises(FileError):
        files.from_json(f'{{"format": "autopipe.cluster", "version": 1, "devices": {inner}}}', Cluster)


def test_content_is_never_executed(tmp_path):
    mark = tmp_path / "executed"
    attacks = [
        {"__class__": "os.system", "args": [f"touch {mark}"]},
        {"__reduce__": ["os.system", [f"touch {mark}"]]},
        {"py/object": "subprocess.Popen", "args": [["touch", str(mark)]]},
        {"_type": "builtins.exec", "value": f"open({str(mark)!r}, 'w')"},
        f"__import__('os').system('touch {mark}')",
        f"!!python/object/apply:os.system ['touch {mark}']",
    ]
    for value in SAMPLES:
        content = json.loads(files.to_json(value))
        for key in {*content} - {*FREE}:
            for attack in attacks:
                refused = error_of(changed(content, (key,), attack), type(value))
                assert refused or isinstance(attack, str), key  # text where text belongs stays text
    assert not mark.exists()


def test_a_pickle_is_refused(tmp_path):
    import pickle

    path = tmp_path / "plan.json"
    path.write_bytes(pickle.dumps({"format": "autopipe.plan"}))
    with pytest.raises(FileError, match=r"plan\.json (cannot be read|is not whole JSON)"):
        files.load(path)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    with pytest.raises(FileError, match=r"none\.json does not exist"):
        files.load(tmp_path / "none.json")
    with pytest.raises(FileError, match="cannot be read"):
        files.load(tmp_path)


@pytest.mark.parametrize("failing", ["replace", "chmod", "fdopen"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch, failing, error):
    path = tmp_path / "plan.json"
    plan().save(path)
    before = path.read_bytes()

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises((FileError, KeyboardInterrupt)):
        replace(plan(), noise=0.5).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(FileError, match=r"plan\.json cannot be written: No such file"):
        plan().save(tmp_path / "nowhere" / "plan.json")


def test_the_check_lies_beside_the_plan():
    assert files.check_path("a/plan.json") == Path("a/plan.check.json")
