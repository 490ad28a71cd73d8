"""The grammar of `--ways` and `--starts`, and reports: from raw starts to summaries, ratios and notes."""

from __future__ import annotations

import msgspec
import pytest
from bench_reports import MACHINE, Bench, filled, made_report, start
from msgspec.structs import replace

from cgtool.adaptor_registry import ADAPTORS
from cgtool.cli import bench_tables as words
from cgtool.errors import UsageError
from cgtool.toolkit.bench.report import notes_on
from cgtool.toolkit.bench.ways import GROUPS, WAYS, Start, Step, parse_starts, parse_ways


def ways_of(report):
    return {way["way"]: way for way in msgspec.to_builtins(report)["ways"]}


def test_uncounted_starts_are_kept_but_not_summarized():
    eager = ways_of(made_report())["eager"]
    assert len(eager["starts"]) == 8
    assert eager["summary"]["ready_secs"] == {
        "count": 7,
        "median": pytest.approx(1.3),
        "q1": pytest.approx(1.15),
        "q3": pytest.approx(1.45),
        "min": 1.0,
        "max": pytest.approx(1.6),
    }


def test_ratios_are_paired_by_round():
    ways = ways_of(made_report())
    ratio = ways["compile-warm"]["ratios"]["eager"]["ready_secs"]
    assert (ratio["pairs"], [ratio["ratio"], ratio["low"], ratio["high"]]) == (7, pytest.approx([6.0] * 3))
    assert ways["compile-warm"]["ratios"]["eager"]["step_8"]["ratio"] == pytest.approx(0.5)
    assert ways["eager"]["ratios"]["compile-warm"]["ready_secs"]["ratio"] == pytest.approx(1 / 6)
    assert ways["compile-warm"]["ratios"]["eager"]["start_secs"]["ratio"] == pytest.approx((2.5 + 7.8) / (2.5 + 1.3))


def test_a_preparation_is_compared_with_a_cold_torch_compile():
    prepare = ways_of(made_report())["cgtool/eager"]["prepare"]
    assert prepare["work_secs"]["median"] == 5.0
    assert prepare["total_secs"]["median"] == 7.5
    assert prepare["over_cold"]["work_secs"]["ratio"] == pytest.approx(5 / 20)
    assert prepare["over_cold"]["total_secs"]["ratio"] == pytest.approx(7.5 / 22.5)


def test_a_failed_way_is_shown_with_its_error_and_last_lines():
    report = made_report()
    failed = ways_of(report)["cgtool/eager"]
    assert (failed["error"], failed["log"]) == ("CacheMissError: <b>nothing</b> fits", ("line 1", "line 2"))
    assert words.failure_lines(report) == ["cgtool, eager failed: CacheMissError: <b>nothing</b> fits"]


def test_one_failed_start_is_shown_among_successful_ones():
    bench = filled()
    bench.ways["compile-warm"].starts[3] = Start(round=3, counted=True, process_secs=1.0, error="it died", log=("why",))
    way = ways_of(made_report(bench))["compile-warm"]
    assert (way["error"], way["log"], way["summary"]["ready_secs"]["count"]) == ("it died", ("why",), 6)
    assert way["ratios"]["eager"]["ready_secs"]["pairs"] == 6


def test_differing_outputs_are_a_note_and_not_a_failure():
    bench = filled()
    bench.ways["compile-warm"].starts[2] = start(2, ready=6.0, problem="output differs by 1e+00", worst=1.0)
    report = made_report(bench)
    way = ways_of(report)["compile-warm"]
    assert way["outputs"] == {
        "equal": False,
        "worst": 1.0,
        "tolerance": 1e-4,
        "problem": "output differs by 1e+00",
    }
    assert report.notes == ("torch.compile, warm local caches: outputs differ from eager's: output differs by 1e+00.",)
    assert words.outputs_text(report.ways[1]) == "DIFFER (1e+00)"


def test_differing_weights_are_a_note():
    bench = filled()
    bench.ways["eager"].starts[0] = start(0, ready=1.0, weights="other")
    (note,) = made_report(bench).notes
    assert note.startswith("The weights differ from start to start")


def test_a_busy_machine_is_a_note():
    ways = filled().reports()
    assert notes_on(ways, {**MACHINE, "load_before": 2.9}) == ()
    (note,) = notes_on(ways, {**MACHINE, "load_before": 7.0})
    assert note == "The machine was busy when the bench began: 7.0 processes on 2 cores."


def test_a_size_that_a_way_refuses_has_its_error():
    bench = Bench("eager", tokens=(1, 8))
    steps = {"8": Step(median_secs=0.01), "1": Step(error="RuntimeError: guards")}
    bench.ways["eager"].starts.append(replace(start(0, ready=1.0), steps=steps))
    report = made_report(bench)
    assert ways_of(report)["eager"]["steps"]["1"] == {"error": "RuntimeError: guards"}
    assert words.failure_lines(report) == ["eager refused num_tokens 1: RuntimeError: guards"]


@pytest.mark.parametrize(
    ("secs", "text"),
    [(38.2e-6, "38.2 µs"), (0.0221, "22.1 ms"), (0.9994, "999 ms"), (1.0, "1.00 s"), (39.44, "39.4 s"), (812, "812 s")],
)
def test_durations_have_three_significant_digits(secs, text):
    assert words.duration_text(secs) == text


def names(text):
    return [way.name for way in parse_ways(text)]


def test_every_adaptor_is_a_way():
    assert set(GROUPS["cgtool"]) == {f"cgtool/{adaptor}" for adaptor in ADAPTORS}


def test_ways_are_in_the_order_of_the_table_and_include_eager():
    assert names("mega-cache, compile-cold") == ["eager", "compile-cold", "mega-cache"]
    assert names("") == ["eager"]
    assert names("all") == list(WAYS)
    assert names("torch,cgtool/eager") == ["eager", *GROUPS["torch"], "cgtool/eager"]


def test_a_bare_number_applies_to_ways_without_an_item():
    starts = parse_starts("15,torch=3,mega-cache=1", default=6)
    assert (starts["eager"], starts["compile-warm"], starts["mega-cache"], starts["cgtool/eager"]) == (15, 3, 1, 15)
    assert set(parse_starts("cgtool=2", default=6).values()) == {2, 6}


@pytest.mark.parametrize("text", ["many", "eager=", "eager=-1", "eager=1.5", "nobody=3"])
def test_invalid_starts_are_refused(text):
    with pytest.raises(UsageError, match="--starts"):
        parse_starts(text, default=6)


def test_only_torch_compile_with_empty_caches_is_cold():
    assert [way.name for way in WAYS.values() if way.is_cold] == ["compile-cold"]
