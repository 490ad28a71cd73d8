"""The page of a bench as text: valid, self-contained, and safe against untrusted input."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from bench_reports import made_report

from cgtool.cli.pages import Bar, bench_page, chart

HOSTILE = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>.py:build"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.words = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def handle_decl(self, decl):
        self.found.append((decl, {}))


def test_untrusted_text_is_escaped():
    tags = Tags(bench_page(made_report(model=HOSTILE, notes=(f"a note of {HOSTILE}",))))
    kinds = {tag for tag, _ in tags.found}
    assert not kinds & {"script", "img", "iframe", "object", "b"}
    assert not [name for _, attrs in tags.found for name in attrs if name.startswith("on")]
    text = "".join(tags.words)
    assert text.count(HOSTILE) >= 3
    assert "CacheMissError: <b>nothing</b> fits" in text


def test_nothing_is_loaded():
    tags = Tags(bench_page(made_report()))
    links = [value for _, attrs in tags.found for name, value in attrs.items() if name in {"src", "href", "srcset"}]
    assert links == ["data:,"]
    (policy,) = [attrs["content"] for tag, attrs in tags.found if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none';")
    assert not re.findall(r"url\(|@import", bench_page(made_report()))


def test_it_is_accessible_to_screen_readers():
    tags = Tags(bench_page(made_report()))
    assert ("html", {"lang": "en"}) in tags.found
    charts = [attrs for tag, attrs in tags.found if tag == "figure"]
    assert [attrs["role"] for attrs in charts] == ["img", "img"]
    assert all("torch.compile, warm local caches: " in attrs["aria-label"] for attrs in charts)
    identifiers = [attrs["id"] for _, attrs in tags.found if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    assert all("scope" in attrs for tag, attrs in tags.found if tag == "th")


def test_bar_widths_are_proportional_to_seconds_on_one_scale():
    picture = chart(
        [
            Bar(label="long", parts={"import_secs": 2.0, "ready_secs": 6.0}),
            Bar(label="short", parts={"import_secs": 2.0, "ready_secs": 0.02}),
            Bar(label="none", parts={}, remark="failed"),
        ],
        title="t",
        name="n",
    )
    widths = [float(width) for width in re.findall(r'<i class="\w+" style="width:([\d.]+)%"', picture)]
    assert widths == pytest.approx([25, 75, 25, 0.25], abs=1e-3)
    assert "none: failed" in picture


def test_a_chart_without_bars_is_still_a_figure():
    assert chart([Bar(label="none", parts={}, remark="failed")], title="t", name="n").startswith("<figure")
