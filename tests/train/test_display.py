"""What a run shows on a terminal and in a log of plain lines."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from flaxen.core.errors import ConfigError, InputError
from flaxen.train import TrainConfig
from flaxen.train.run.display import Lines, Live, display
from flaxen.train.run.pace import Pace, clock
from flaxen.train.run.samples import sample_prompts


def row(step, **more):
    told = {"step": step, "loss": 2.0 + step, "lr": 1e-3, "grad_norm": 0.5, "tokens": 100}
    return told | {"seconds": 2.0, "tokens_per_second": 50.0} | more


def test_the_time_left_counts_no_compiling():
    pace = Pace(steps=10, step=0)
    pace.add(row(1, seconds=60.0))
    assert math.isnan(pace.left)
    for step in (2, 3, 4):
        pace.add(row(step))
    assert pace.left == pytest.approx(6 * 2.0)


def test_the_smoothed_loss_is_a_corrected_mean():
    pace = Pace(steps=10, step=0)
    for step, loss in enumerate([3.0, math.nan, 1.0], 1):
        pace.add(row(step, loss=loss))
    assert pace.loss.mean == pytest.approx((0.9 * 3 + 1) / 1.9)


def test_plain_lines_come_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lines = Lines(steps=40, step=0)
    for step in range(1, 41):
        now[0] += 1.0
        lines.row(row(step))
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in shown] == [
        f"step {step}/40" for step in (1, 11, 21, 31, 40)
    ]
    assert "lr 0.001, grad norm 0.5, 50 tokens/s" in shown[1] and "0:00:58 left" in shown[1]


def test_plain_lines_come_every_so_many_steps(capsys):
    lines = Lines(steps=9, step=0, every=4)
    for step in range(1, 10):
        lines.row(row(step, skipped=2, mfu=0.421, memory_bytes=3 * 2**30))
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in shown] == [f"step {n}/9" for n in (1, 4, 8, 9)]
    assert "MFU 42.1%, 3.0 GiB, 2 skipped" in shown[0]


def test_a_reward_is_told_with_its_spread_before_the_loss(capsys):
    lines = Lines(steps=2, step=0)
    lines.row(row(1, reward=0.5, reward_std=0.25))
    lines.row(row(2, reward=1.0, reward_std=0.125))
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1/2, reward 0.500 (last 0.500 ± 0.250), loss")
    mean = (0.9 * 0.5 + 1.0) / 1.9
    assert last.startswith(f"step 2/2, reward {mean:.3f} (last 1.000 ± 0.125), loss")


def test_a_step_that_nobody_judged_tells_no_reward(capsys):
    lines = Lines(steps=2, step=0)
    lines.row(row(1, reward=0.5, reward_std=0.25))
    lines.row(row(2))
    assert "reward" not in capsys.readouterr().err.splitlines()[1]


def test_how_often_the_better_answer_wins_is_told(capsys):
    Lines(steps=1, step=0).row(row(1, **{"rewards/accuracies": 0.75}))
    assert "accuracy 0.750 (last 0.750)" in capsys.readouterr().err


def test_an_evaluation_and_an_answer_are_lines_of_their_own(capsys):
    lines = Lines(steps=9, step=0)
    lines.row({"step": 4, "eval_loss": 1.5, "perplexity": 4.4817, "eval_seconds": 2.0})
    lines.sample({"step": 4, "number": 0, "prompt": "Hi", "text": "Hello\nyou"})
    assert capsys.readouterr().err.splitlines() == [
        "step 4: eval loss 1.5000, perplexity 4.4817",
        "step 4: 'Hi' -> 'Hello\\nyou'",
    ]


def test_a_terminal_has_two_lines_and_skips_in_red():
    console = Console(file=io.StringIO(), force_terminal=True, width=140, color_system="standard")
    live = Live(20, 0, console)
    console.print(live)
    assert "compiling" in console.file.getvalue()
    live.row(row(1))
    live.row(row(5, skipped=3, mfu=0.5))
    console.file = io.StringIO()
    console.print(live)
    shown = console.file.getvalue()
    assert len(shown.splitlines()) == 2
    assert "5/20" in shown and "0:00:30 left" in shown and "MFU 50.0%" in shown
    assert "\x1b[1;31m · 3 skipped" in shown


def test_nothing_is_shown_where_nobody_asks(capsys):
    with display(9, 0, 0, show=False) as shown:
        assert shown == []


def test_without_a_terminal_lines_are_shown():
    with display(9, 0, 0, show=True) as (shown,):
        assert isinstance(shown, Lines)


def test_a_run_that_goes_on_says_from_where(capsys):
    with display(9, 4, 0, show=True):
        pass
    assert capsys.readouterr().err == "Going on after step 4 of 9.\n"


def test_hours_are_told():
    assert clock(3725.4) == "1:02:05" and clock(math.nan) == "-:--:--"


@pytest.mark.parametrize("peak", ["much", 0, -1.0, ""])
def test_a_peak_that_is_none_is_refused(peak):
    with pytest.raises(ConfigError, match="peak_flops is .*, expected operations a second"):
        TrainConfig(output="x", peak_flops=peak)


def test_a_peak_of_yaml_may_be_text():
    assert TrainConfig(output="x", peak_flops="989e12").peak() == 989e12


class Tokenizer:
    chat_template = None


def prompts_of(asked, monkeypatch):
    monkeypatch.setattr("flaxen.train.run.samples.only_generating", lambda *_: None)
    monkeypatch.setattr("flaxen.train.run.samples.encode", lambda tok, text: [1] * len(text))
    monkeypatch.setattr("flaxen.train.run.samples.encode_chat", lambda tok, m: [2] * len(m))

    class Model:
        module = None

    return sample_prompts(TrainConfig(output="x", sample_prompts=asked), Model(), Tokenizer())


def test_prompts_come_from_a_file_of_texts_or_chats(monkeypatch, tmp_path):
    texts, chats = tmp_path / "p.txt", tmp_path / "p.jsonl"
    texts.write_text("One\n\nTwo\n")
    chats.write_text(
        '{"prompt": "One"}\n{"messages": [{"role": "system", "content": "Be brief."}, '
        '{"role": "user", "content": "Two"}]}\n'
    )
    assert [p.text for p in prompts_of(str(texts), monkeypatch)] == ["One", "Two"]
    found = prompts_of([str(chats)], monkeypatch)
    assert [(p.text, p.ids) for p in found] == [("One", [1, 1, 1]), ("Two", [2, 2])]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", r"p\.jsonl:1 is no JSON .*expected"),
        ('{"text": "a"}', r"p\.jsonl:1 is .*expected"),
        ('{"messages": ["a"]}', r"p\.jsonl:1 is .*expected"),
        ('{"prompt": " "}', "prompt 1 is empty"),
        ("", "there is none"),
    ],
)
def test_a_bad_prompt_is_named(line, match, monkeypatch, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=match):
        prompts_of(str(path), monkeypatch)


@pytest.mark.parametrize("name", ["p.pdf", "absent.txt"])
def test_a_file_that_is_none_is_named(name, monkeypatch):
    with pytest.raises(InputError, match=name):
        prompts_of(name, monkeypatch)
