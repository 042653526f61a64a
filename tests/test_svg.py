"""The timeline's picture: every span where its times say, memory against the limit, and all of it well-formed.

``UPDATE_GOLDEN=1 pytest tests/test_svg.py`` writes the golden file anew; look at it before keeping it.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.core.schedule import Op
from autopipe.core.timeline import Timeline
from autopipe.report import svg
from autopipe.report.svg import timeline_svg
from autopipe.simulate import simulate_plan
from tests.samples import check_result, plan
from tests.test_panels import line

GOLDEN = Path(__file__).parent / "golden" / "timeline.svg"
NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def picture() -> str:
    return timeline_svg(
        simulate_plan(plan()), check_result().timeline, limits=plan().memory_limit_bytes, title="gpt2.py, 1F1B"
    )


def lanes(text: str) -> dict[tuple[int, str], list[ET.Element]]:
    """The spans' paths by rank and origin."""
    found = ET.fromstring(text).findall(".//svg:g[@class='lane']", NAMESPACE)
    return {
        (int(lane.attrib["data-rank"]), lane.attrib["data-origin"]): lane.findall("svg:path[@class='s']", NAMESPACE)
        for lane in found
    }


def box(path: ET.Element) -> tuple[float, float]:
    """Left edge and width."""
    x, wide = re.match(r"M(\S+) 0h(\S+?)v", path.attrib["d"]).groups()
    return float(x), float(wide)


def title(path: ET.Element) -> str:
    return path.find("svg:title", NAMESPACE).text


def test_the_picture_is_the_golden_one():
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(picture())
    assert picture() == GOLDEN.read_text()


def test_every_span_is_where_its_times_say():
    for line_ in (simulate_plan(plan()), check_result().timeline):
        found = lanes(picture())
        for rank in range(2):
            spans = [span for span in line_.spans if span.rank == rank]
            paths = found[rank, line_.origin]
            assert [title(path).split()[0] for path in paths] == [str(span.action) for span in spans]
            scale = (svg.WIDTH - svg._GUTTER - svg._RIGHT) / check_result().timeline.step_s  # the longer one fills it
            for span, path in zip(spans, paths, strict=True):
                x, wide = box(path)
                assert x == pytest.approx(span.start_s * scale, abs=0.02)
                assert wide == pytest.approx((span.end_s - span.start_s) * scale, abs=0.02)


def test_without_a_measurement_there_is_one_lane_a_rank():
    assert set(lanes(timeline_svg(simulate_plan(plan())))) == {(0, "predicted"), (1, "predicted")}


def test_operations_differ_in_texture_and_stages_of_a_rank_in_shade():
    text = timeline_svg(line("ZB-V", 2, 4, 2))
    patterns = {p.attrib["id"]: p for p in ET.fromstring(text).findall(".//svg:pattern", NAMESPACE)}
    textures = {op: patterns[f"timeline-{op}0"].find("svg:path", NAMESPACE) for op in "FIWO"}
    drawn = [None if texture is None else texture.attrib["d"] for texture in textures.values()]
    assert len(set(drawn)) == 4
    colours = {key: p.find("svg:rect", NAMESPACE).attrib["fill"] for key, p in patterns.items()}
    assert len(set(colours.values())) == len(colours)
    used = Counter(path.attrib["fill"] for paths in lanes(text).values() for path in paths)
    assert used["url(#timeline-F0)"] == used["url(#timeline-F1)"] == 8


def test_labels_say_which_action_and_fit():
    text = timeline_svg(line("1F1B", 4, 8))
    labels = ET.fromstring(text).findall(".//svg:text[@class='in']", NAMESPACE)
    assert {"0F0", "3B7"} <= {label.text for label in labels}
    paths = [path for found in lanes(text).values() for path in found]
    wide = [box(path)[1] for path in paths]
    assert len(labels) <= sum(w >= svg._LETTER for w in wide)


def test_the_limit_is_drawn_to_scale_or_says_that_it_is_not():
    timeline = simulate_plan(plan())
    peak = max(timeline.peak_bytes)
    near, far = (timeline_svg(timeline, limits=(limit, limit)) for limit in (2 * peak, 100 * peak))
    assert "(cut off)" not in near
    assert far.count("(cut off)") == 2
    assert far.count('class="limit"') == 2 + 1  # the ranks and the legend
    assert 'class="limit"' not in timeline_svg(timeline)


def test_the_memory_curve_goes_as_high_as_the_peak():
    timeline = simulate_plan(plan())
    root = ET.fromstring(timeline_svg(timeline))
    curves = root.findall(".//svg:g[@class='memory']/svg:path[@class='held']", NAMESPACE)
    for curve in curves:
        heights = [float(y) for y in re.findall(r"V(\S+?)(?=[HVz])", curve.attrib["d"])]
        assert min(heights) == pytest.approx(6.0, abs=0.01)  # six pixels are left above the highest


def test_a_long_step_says_that_it_is_drawn_in_parts():
    text = timeline_svg(line("1F1B", 4, 3000))
    assert "drawn are warm-up, one steady period, drain of 24.0 k spans" in text
    assert len(text.encode()) < 1_000_000
    root = ET.fromstring(text)
    assert [t.text for t in root.findall(".//svg:g/svg:text[@class='name']", NAMESPACE)][:3] == [
        "warm-up",
        "one steady period",
        "drain",
    ]


def test_titles_are_data():
    text = timeline_svg(simulate_plan(plan()), title="<script>alert('x')</script> & more")
    assert "<script>" not in text
    assert ET.fromstring(text).find("svg:title", NAMESPACE).text == "<script>alert('x')</script> & more"


def test_an_empty_memory_and_an_empty_step_are_drawn():
    bare = replace(simulate_plan(plan()), memory=((), ()))
    assert 'class="memory"' not in timeline_svg(bare)
    ET.fromstring(timeline_svg(Timeline(1, (), ((),), 0.0)))


def test_nothing_is_loaded_from_elsewhere():
    assert re.findall(r"https?://[^\"']+", picture()) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"url\((.)", picture())) == {"#"}


def test_the_kinds_of_actions_are_all_named():
    assert set(svg.NAMES) == set(svg._COLOURS) == set(svg._TEXTURES) == set(Op)
