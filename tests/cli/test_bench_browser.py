"""The page of a bench in a headless Chromium: it renders, its bars are laid out correctly, nothing is fetched."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
from bench_reports import Bench, made_report

from cgtool.cli.pages import bench_page as page_of
from cgtool.toolkit.bench.ways import WAYS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install -e '.[test]'")
    with sync_api.sync_playwright() as playwright:
        # The sandbox does not work as root in a container; the page is trusted.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """An open page, with its console messages and requests."""

    def __init__(self, browser, file, **options):
        self.page = browser.new_page(**options)
        self.messages, self.requests = [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri(), wait_until="networkidle")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bench.html"
    path.write_text(page_of(made_report()), encoding="utf-8")
    return path


def test_it_renders_without_messages_and_without_network_access(chromium, file):
    visit = Visit(chromium, file)
    assert visit.messages == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [file.as_uri()]
    assert visit.page.title() == "Ways to start model.py:build"
    assert visit.page.locator("h1").is_visible()
    assert visit.page.locator("table").count() == 2
    assert visit.page.get_by_text("cgtool, eager failed: CacheMissError: <b>nothing</b> fits").is_visible()
    picture = file.with_suffix(".png")
    visit.page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 20_000


def test_parts_of_a_bar_are_adjacent_and_inside_the_chart(chromium, file):
    visit = Visit(chromium, file)
    picture = visit.page.locator("#phases").bounding_box()
    boxes = [visit.page.locator(f"#phases i.{phase}").nth(1).bounding_box() for phase in ("import", "build", "ready")]
    for left, right in pairwise(boxes):
        assert left["x"] + left["width"] == pytest.approx(right["x"], abs=0.5)
    value = visit.page.locator("#phases .row").nth(1).locator(".value").bounding_box()
    assert value["x"] > boxes[-1]["x"] + boxes[-1]["width"]
    assert value["x"] + value["width"] <= picture["x"] + picture["width"]


def test_every_label_is_inside_the_chart_and_before_its_bar(chromium, tmp_path):
    file = tmp_path / "all.html"
    file.write_text(page_of(made_report(Bench("all"))), encoding="utf-8")
    visit = Visit(chromium, file)
    picture = visit.page.locator("#phases").bounding_box()
    bars = visit.page.locator("#phases .bars").first.bounding_box()
    labels = visit.page.locator("#phases .label").all()
    assert len(labels) == len(WAYS)
    for box in (label.bounding_box() for label in labels):
        assert picture["x"] <= box["x"]
        assert box["x"] + box["width"] < bars["x"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_light_and_dark_mode(chromium, file, scheme):
    visit = Visit(chromium, file, color_scheme=scheme)
    ink, paper = visit.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    bright = [_luminance(colour) for colour in (ink, paper)]
    assert (max(bright) + 0.05) / (min(bright) + 0.05) > 7
    assert (bright[1] > bright[0]) == (scheme == "light")


def test_a_narrow_window_scrolls_the_tables_but_not_the_page(chromium, file):
    visit = Visit(chromium, file, viewport={"width": 400, "height": 800})
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def _luminance(colour):
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
