"""The page in a real headless Chromium: it loads nothing, fits a desk and a phone, and its picture can be driven.

Needs the package playwright and a Chromium on the path (Debian: ``apt-get install chromium``); skipped without.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from autopipe.report import html
from autopipe.simulate import simulate_plan
from tests.samples import check_result, cluster, plan, profile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.report(plan(), profile=profile(), cluster=cluster(), measured=check_result()))
    return path


@pytest.fixture
def opened(browser, file):
    """The page at 1280 pixels; ends with an error where it said anything on the console or asked for another file."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    yield page
    page.close()
    assert (said, asked) == ([], [file.as_uri()])


def span(page, name: str, rank: int = 0, origin: str = "predicted"):
    lane = f"g.lane[data-rank='{rank}'][data-origin='{origin}']"
    return page.locator(f"{lane} path.s", has=page.locator(f"title:text-matches('^{name} ')"))


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_never_wider_than_the_window(browser, file, width):
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    letters = page.evaluate("[...document.querySelectorAll('.tl text.in')].map(t => t.getBoundingClientRect().height)")
    assert min(letters) >= 9  # pixels: what can be read
    page.close()


def test_hovering_a_span_says_what_it_is(opened):
    span(opened, "1B2", rank=1, origin="measured").hover()
    action = next(s for s in check_result().timeline.spans if str(s.action) == "1B2")
    said = opened.locator("output").inner_text()
    assert said.startswith("rank 1, measured: 1B2 ")
    assert f"{1e3 * action.start_s:.1f} ms" in said
    assert opened.locator(".tl .on").count() == 1


def test_zooming_keeps_times_and_labels_apart(opened):
    before = span(opened, "0B1").bounding_box()
    labels = opened.locator(".tl text.in").count()
    opened.get_by_label("zoom in").click()
    opened.get_by_label("zoom in").click()
    after = span(opened, "0B1").bounding_box()
    assert after["width"] == pytest.approx(4 * before["width"], rel=0.02)
    assert after["height"] == pytest.approx(before["height"], rel=0.05)
    assert opened.locator(".tl text.in").count() >= labels
    view = opened.locator(".view")
    assert view.evaluate("e => e.scrollWidth") > 3 * view.evaluate("e => e.clientWidth")
    rank = opened.locator(".gutter text", has_text="rank 0").bounding_box()
    assert 0 < rank["x"] < 200  # the names stay where they can be seen
    opened.get_by_label("show all").click()
    assert span(opened, "0B1").bounding_box() == pytest.approx(before, abs=0.5)


def test_the_wheel_with_ctrl_zooms_where_the_pointer_is(opened):
    target = span(opened, "0B2")
    target.scroll_into_view_if_needed()
    before = target.bounding_box()
    middle = before["x"] + before["width"] / 2
    opened.mouse.move(middle, before["y"] + 5)
    opened.keyboard.down("Control")
    opened.mouse.wheel(0, -200)
    opened.keyboard.up("Control")
    opened.wait_for_function("+document.querySelector('figure.timeline').dataset.zoom > 2.5")
    after = target.bounding_box()
    assert after["width"] > 2.5 * before["width"]
    assert after["x"] < middle < after["x"] + after["width"]


def test_every_span_is_reached_by_keys(opened):
    opened.locator(".view").focus()
    opened.keyboard.press("ArrowRight")
    output = opened.locator("output")
    spans = [s for s in simulate_plan(plan()).spans if s.rank == 0]
    for each in spans:
        assert output.inner_text().startswith(f"rank 0, predicted: {each.action} ")
        opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowDown")
    assert output.inner_text().startswith("rank 0, measured: 0O0 ")
    opened.keyboard.press("+")
    assert float(opened.locator("figure.timeline").get_attribute("data-zoom")) == 1.5


def test_dark_is_dark_and_paper_is_white(browser, file):
    colours = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        page = browser.new_page(color_scheme=scheme)
        page.emulate_media(media=media, color_scheme=scheme)
        page.goto(file.as_uri())
        colours[scheme, media] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.paper')).fill]"
        )
        page.close()
    assert colours["light", "screen"] == colours["dark", "print"] == ["rgb(255, 255, 255)"] * 2
    assert colours["dark", "screen"] == ["rgb(21, 24, 28)"] * 2


def test_it_prints(browser, file):
    page = browser.new_page()
    page.goto(file.as_uri())
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 1 <= pdf.count(b"/Type /Page\n") <= 4
    page.close()


def test_names_do_not_run(browser, tmp_path):
    name = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    first = plan().stages[0]
    renamed = replace(plan(), stages=(replace(first, layers=(name, "h.0", "h.1")), plan().stages[1]), limited_by=name)
    (tmp_path / "page.html").write_text(html.report(renamed))
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.title().startswith("gpt2.py")
    assert name in page.inner_text("#limits")
    page.close()
