"""Curves of several runs: what is read, how it is laid out, and the page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from xml.dom import minidom

import pytest

from flaxen.core.errors import InputError
from flaxen.show import curves_page, curves_picture
from flaxen.show.curve_page import HEIGHT, ticks
from flaxen.show.curves import MOST, open_runs, panels, summary
from flaxen.show.plot import colour


def write(folder, rows, end=""):
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "log.jsonl").write_text(lines + end)
    return folder


def steps(count, **more):
    return [
        {"step": i, "loss": 8.0 / i, "tokens": 100, "seconds": 0.5} | more
        for i in range(1, count + 1)
    ]


@pytest.fixture
def two(tmp_path):
    tests = [{"step": 0, "eval_loss": 9.0}, *steps(2), {"step": 2, "eval_loss": 3.0}, *steps(4)[2:]]
    return [write(tmp_path / "a", tests), write(tmp_path / "b", steps(3), end='{"step": 4, "lo')]


def test_two_runs_lie_in_one_field_with_their_evaluations(two):
    (panel,) = panels(open_runs(two), ["loss"], smooth=0)
    assert [(c.run, c.label, c.tests) for c in panel.curves] == [
        (0, "a", False),
        (0, "a (evaluation)", True),
        (1, "b", False),
    ]
    assert panel.curves[0].y == [8.0, 4.0, 8 / 3, 2.0]
    assert panel.curves[2].x == [1, 2, 3]


def test_what_an_objective_tells_is_drawn_first(tmp_path):
    run = write(tmp_path / "a", steps(2, reward=1.0, reward_std=0.5, entropy=2.0))
    found = [panel.metric for panel in panels(open_runs([run]))]
    assert found == ["reward", "reward_std", "loss"]


@pytest.mark.parametrize(
    ("x", "of_steps", "of_tests"),
    [
        ("step", [1, 2, 3, 4], [0, 2]),
        ("tokens", [100, 200, 300, 400], [0, 200]),
        ("seconds", [0.5, 1.0, 1.5, 2.0], [0, 1.0]),
    ],
)
def test_curves_are_drawn_over_what_was_spent(x, of_steps, of_tests, two):
    curves = panels(open_runs(two), ["loss"], x=x)[0].curves
    assert (curves[0].x, curves[1].x) == (of_steps, of_tests)


def test_smoothing_leaves_out_what_is_not_finite(tmp_path):
    rows = [{"step": i, "loss": x} for i, x in enumerate([2.0, math.nan, 4.0])]
    curve = panels(open_runs([write(tmp_path / "a", rows)]), smooth=0.5)[0].curves[0]
    assert curve.smooth == [2.0, 2.0, pytest.approx((0.5 * 2 + 4) / 1.5)]


def test_a_long_run_is_thinned_by_means(tmp_path):
    rows = [{"step": i, "loss": float(i % 2)} for i in range(2 * MOST)]
    curve = panels(open_runs([write(tmp_path / "a", rows)]), smooth=0)[0].curves[0]
    assert len(curve.x) == MOST and set(curve.y) == {0.5} and curve.x[:2] == [0.5, 2.5]


def test_the_usual_metrics_are_those_that_there_are(two):
    assert [panel.metric for panel in panels(open_runs(two))] == ["loss"]


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [write(tmp_path / side / "run", steps(1)) for side in ("left", "right")]
    assert [log.label for log in open_runs(runs)] == ["left/run", "right/run"]


def test_a_summary_tells_first_last_and_extremes(two):
    found = summary(open_runs(two), ["loss"])[0]
    assert (found["run"], found["step"]) == ("a", 4)
    assert found["metrics"]["loss"] == {"first": 8.0, "last": 2.0, "least": 2.0, "greatest": 8.0}
    assert found["metrics"]["eval_loss"]["least"] == 3.0


def test_a_metric_that_no_run_has_is_named_with_the_nearest(two):
    with pytest.raises(InputError, match=r"'los'\. Did you mean 'loss'"):
        panels(open_runs(two), ["los"])


@pytest.mark.parametrize("given", [{"x": "hours"}, {"smooth": 1.0}, {"smooth": -0.1}])
def test_an_axis_or_smoothing_without_sense_is_refused(given, two):
    with pytest.raises(InputError, match=f"{next(iter(given))} is .*expected"):
        panels(open_runs(two), **given)


def test_a_bad_line_is_named(tmp_path):
    run = write(tmp_path / "a", [{"step": 1, "loss": 1.0}], end="<html>\n")
    with pytest.raises(InputError, match=r"log\.jsonl:2 is '<html>'; expected a JSON object"):
        open_runs([run])


def test_a_folder_without_a_log_and_an_empty_log_are_no_runs(tmp_path):
    with pytest.raises(InputError, match=r"is no run: it has no log\.jsonl"):
        open_runs([tmp_path])
    with pytest.raises(InputError, match="no whole line yet"):
        open_runs([write(tmp_path / "a", [], end='{"step"')])


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.scripts, self.inside = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href")]
        self.inside = dict(attrs).get("type", "") if tag == "script" else self.inside

    def handle_data(self, data):
        if self.inside == "application/json":
            self.scripts.append(json.loads(data))
            self.inside = ""


def drawings(text):
    return [minidom.parseString(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_a_page_needs_nothing_else_and_no_name_breaks_it(tmp_path):
    run = write(tmp_path / "<b>&'x", [*steps(3), {"step": 4, "loss": math.nan}])
    text = curves_page(panels(open_runs([run])), "step")
    page = Page(text)
    assert page.links == [] and "http" not in text
    assert page.scripts[0]["curves"][0]["label"] == "<b>&'x"
    assert page.scripts[0]["curves"][0]["y"][-1] is None
    assert "&lt;b&gt;&amp;" in text and "<b>&'x" not in text


def test_a_curve_goes_through_its_points_upwards(tmp_path):
    rows = [{"step": 0, "loss": 0.0}, {"step": 1, "loss": math.nan}, {"step": 2, "loss": 1.0}]
    text = curves_page(panels(open_runs([write(tmp_path / "a", rows)]), smooth=0), "step")
    (drawing,) = drawings(text)
    path = drawing.getElementsByTagName("path")[0].getAttribute("d")
    # The step between is a gap: two beginnings. Down the page is down in value.
    (x0, y0), (x2, y2) = [tuple(map(float, p.split())) for p in path.split("M")[1:]]
    assert x0 == 64 and x2 == 628 and y0 == HEIGHT - 34 and y2 == 12


def test_a_logarithmic_scale_leaves_out_what_it_cannot_show(tmp_path):
    rows = [{"step": i, "loss": x} for i, x in enumerate([100.0, 0.0, 10.0, 1.0])]
    text = curves_page(
        panels(open_runs([write(tmp_path / "a", rows)]), smooth=0), "step", log_y=True
    )
    path = drawings(text)[0].getElementsByTagName("path")[0].getAttribute("d")
    ys = [float(y) for y in re.findall(r" ([\d.]+)", path)]
    assert ys == pytest.approx([12, (12 + HEIGHT - 34) / 2, HEIGHT - 34])


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_a_flat_curve_and_a_single_point_can_be_drawn(value, tmp_path):
    rows = [{"step": 3, "loss": value}]
    text = curves_page(panels(open_runs([write(tmp_path / "a", rows)])), "step")
    assert len(drawings(text)[0].getElementsByTagName("circle")) == 1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.12, 0.31, [0.15, 0.2, 0.25, 0.3]), (-1, 1, [-1, 0, 1])],
)
def test_ticks_are_round_numbers(low, high, expected):
    found = ticks(low, high, count=5 if high > 1 or low > 0 else 2)
    assert found == pytest.approx(expected)


def test_a_picture_is_a_png(two, tmp_path):
    target = tmp_path / "new" / "c.png"
    assert curves_picture(panels(open_runs(two)), target, "step", log_y=True) == target
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in target.parent.iterdir()] == ["c.png"]


@pytest.mark.parametrize("number", ["9" * 5000, "[" * 100_000])
def test_a_line_that_no_reader_takes_is_named(number, tmp_path):
    write(tmp_path / "a", steps(2), end='{"step": 3, "loss": ' + number + "}\n")
    with pytest.raises(InputError, match=r"log\.jsonl:3 is .* expected a JSON object"):
        open_runs([tmp_path / "a"])


@pytest.mark.parametrize("value", [10**400, 1e308], ids=["int", "float"])
def test_numbers_beyond_all_others_are_left_out(value, tmp_path):
    rows = [*steps(2), {"step": 3, "loss": value}, {"step": 4, "loss": -value}]
    drawn = panels(open_runs([write(tmp_path / "a", rows)]), ["loss"])
    assert drawn[0].curves[0].y == [8.0, 4.0, math.inf, -math.inf]
    assert "<path" in curves_page(drawn, "step")
    curves_picture(drawn, tmp_path / "c.png", "step")


def test_a_log_of_words_is_told(tmp_path):
    with pytest.raises(InputError, match="has no number besides steps"):
        open_runs([write(tmp_path / "a", [{"step": 1, "text": "a"}])])
    with pytest.raises(InputError, match=r"log\.jsonl:1 is .* expected a JSON object with a step"):
        open_runs([write(tmp_path / "b", [{"step": True, "loss": 1.0}])])


def test_only_line_feeds_end_a_line(tmp_path):
    end = '{"step": 3, "loss": 1.0, "text": "a\u2028b\x85c"}\n'
    write(tmp_path / "a", steps(2), end=end)
    assert [row["step"] for row in open_runs([tmp_path / "a"])[0].rows] == [1, 2, 3]


def test_a_place_that_is_no_number_has_no_point(tmp_path):
    rows = [{"step": 1, "loss": 3.0, "seconds": 1.0}, {"step": 2, "loss": 2.0, "seconds": math.nan}]
    curves = panels(open_runs([write(tmp_path / "a", rows)]), ["loss"], x="seconds")[0].curves
    assert [(curve.x, curve.y) for curve in curves] == [([1.0], [3.0])]


def test_twenty_runs_have_twenty_colours():
    found = [colour(run) for run in range(20)]
    assert len(set(found)) == 20
    assert all(re.fullmatch("#[0-9a-f]{6}", one) for one in found)
