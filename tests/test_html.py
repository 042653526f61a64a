"""The page of a plan: whole, escaped, small, and its numbers those of the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import autopipe.schedules  # noqa: F401  registers the schedules
from autopipe.core.plan import Rejected, ScheduleTable
from autopipe.core.schedule import kind
from autopipe.core.units import format_bytes, format_duration
from autopipe.report import html
from autopipe.report.traffic import crossings
from autopipe.simulate import simulate_plan
from tests.samples import check_result, cluster, plan, profile

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """What a browser would see: text outside style and script, tags, ids, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]

    def under(self, *headers: str) -> list[list[str]]:
        """The rows of the table with these first headers."""
        return next(rows for first, *rows in self.tables if first[: len(headers)] == [*headers])


def whole() -> str:
    return html.report(plan(), profile=profile(), cluster=cluster(), measured=check_result(), why="Because & so.")


def test_the_page_is_well_formed_and_its_ids_and_links_agree():
    page = Page(whole())
    assert page.open == []
    assert len(set(page.ids())) == len(page.ids())
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(page.ids())


def test_nothing_is_loaded_from_elsewhere():
    page = Page(whole())
    assert not [attributes for _, attributes in page.tags if {"src", "srcset"} & attributes.keys()]
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "img", "object")]
    assert not re.findall(r"@import|url\((?!#)", whole())
    assert "default-src 'none'" in whole()


def test_the_stages_are_those_of_the_plan():
    rows = Page(whole()).under("stage", "rank", "layers")
    for stage, row in zip(plan().stages, rows, strict=True):
        costs = stage.costs
        assert row[:2] == [str(stage.index), str(stage.rank)]
        assert row[2] == f"{stage.layers[0]} … {stage.layers[-1]} ({len(stage.layers)})"
        assert row[4:7] == [*map(format_duration, (costs.forward_s, costs.backward_s, costs.optimizer_s))]


def test_the_work_of_the_stages_is_that_of_the_step():
    timeline = simulate_plan(plan())
    for stage in plan().stages:
        assert sum(html._work_s(timeline, stage).values()) == pytest.approx(timeline.work_s(stage.rank))


def test_the_parts_of_the_memory_add_up_to_the_peak():
    for rank in range(2):
        share = html._share(plan(), rank)
        assert min(share) > 0
        assert sum(share) == plan().predicted.peak_bytes[rank]
    rows = Page(whole()).under("rank", "", "weights")
    assert [row[7] for row in rows] == [format_bytes(peak) for peak in plan().predicted.peak_bytes]
    assert [row[8] for row in rows] == [format_bytes(peak) for peak in check_result().measured.peak_bytes]


def test_the_tensors_over_a_boundary_add_up_to_what_the_stages_send():
    for stage in plan().stages[:-1]:
        own = [each for each in crossings(plan()) if each.stage == stage.index]
        assert sum(each.forward_bytes for each in own) == stage.costs.send_bytes
        assert sum(each.gradient_bytes for each in own) == stage.costs.receive_grad_bytes
    assert Page(whole()).under("stages", "tensor")[0][:5] == ["0 → 1", "h.1.out", "", "2 × 128 × 256", "float32"]


def test_a_value_that_is_only_passed_on_says_so():
    first, second = plan().stages
    edge = replace(first.sends[0], consumers=(9,))
    relayed = replace(plan(), stages=(replace(first, sends=(edge,)), second))
    assert "h.1.out (passed on)" in Page(html.report(relayed)).text


def test_every_layer_is_listed_and_the_cut_is_marked():
    page = Page(whole())
    rows = page.under("layer", "name")
    assert [row[1] for row in rows] == [layer.name for layer in profile().layers]
    assert [row[3] for row in rows] == ["0", "0", "0", "1", "1", "1"]
    costs = profile().at(plan().micro_batch)
    assert [row[4] for row in rows] == [format_duration(cost.forward_s) for cost in costs]
    assert sum(attributes.get("class") == "cut" for tag, attributes in page.tags if tag == "tr") == 1


def test_every_rejected_way_stands_with_its_reason():
    rows = Page(whole()).under("instead", "")
    assert rows[0][0] == "this plan"
    assert [(row[0], row[5]) for row in rows[1:]] == [(other.what, other.reason) for other in plan().rejected]


def test_without_check_and_profile_the_page_says_what_is_missing():
    text = Page(html.report(plan())).text
    assert "Not run yet: autopipe check plan.json measures it." in text
    assert "The costs of single layers are in examples/gpt2.profile.json, which is not here" in text


def test_a_failed_parity_is_told_in_red():
    failed = replace(check_result(), parity=replace(check_result().parity, passed=False))
    assert '<p class="bad">parity FAILED' in html.report(plan(), measured=failed)


NASTY = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&lt;b", "</style><b>", "a\x00b\nc", "'\"`"]


@pytest.mark.parametrize("name", NASTY)
def test_names_are_data(name):
    layers = (replace(profile().layers[0], name=name), *profile().layers[1:])
    first = replace(plan().stages[0], layers=(name, "h.0", "h.1"))
    edge = replace(first.sends[0], name=name)
    renamed = replace(
        plan(),
        stages=(replace(first, sends=(edge,)), plan().stages[1]),
        model=replace(plan().model, name=name, path=name),
        limited_by=name,
        notes=(name,),
        rejected=(Rejected(name, name),),
        provenance={name: name},
    )
    text = html.report(renamed, profile=replace(profile(), layers=layers), why=name)
    page, plain = Page(text), Page(html.report(plan(), profile=profile(), why="x"))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert [t for t, _ in page.tags].count("script") == 1
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    assert page.text.count(shown) >= 8


def many(ranks: int, micro_batches: int):
    """The sample plan stretched over many ranks: the pages' size, not its numbers, is what it is for."""
    schedule = kind("1F1B").schedule(ranks, micro_batches)
    first, last = plan().stages
    stages = tuple(
        replace(first if i < ranks - 1 else last, index=i, rank=i, start=i, stop=i + 1) for i in range(ranks)
    )
    made = replace(
        plan(),
        schedule=ScheduleTable.of(schedule),
        stages=stages,
        hops=plan().hops * (ranks - 1),
        depth=ranks,
        micro_batches=micro_batches,
        global_batch=2 * micro_batches,
        memory_limit_bytes=(2**40,) * ranks,
        predicted=replace(plan().predicted, peak_bytes=(2**30,) * ranks),
    )
    line = simulate_plan(made)
    return replace(made, predicted=replace(made.predicted, step_s=line.step_s, peak_bytes=line.peak_bytes)), line


@pytest.mark.parametrize(("ranks", "micro_batches"), [(16, 76), (4, 1500), (32, 160)])
def test_the_page_stays_below_a_megabyte_and_a_half(ranks, micro_batches):
    made, line = many(ranks, micro_batches)
    predicted = replace(check_result().predicted, peak_bytes=line.peak_bytes)
    measured = replace(
        check_result(),
        predicted=predicted,
        measured=replace(check_result().measured, peak_bytes=line.peak_bytes),
        timeline=replace(line, origin="measured"),
        stages=check_result().stages * (ranks // 2),
    )
    text = html.report(made, measured=measured)
    assert len(text.encode()) < 1_500_000
    assert ("one steady period" in text) == (2 * len(line.spans) > 5000)
