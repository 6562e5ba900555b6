"""`flaxen train`: what is refused before a model is loaded, and what is said at the end."""

from __future__ import annotations

import json
import types

import pytest
from cli.stubs import set_stage

from flaxen.cli import main
from flaxen.cli.train import _tell, _told, function_of
from flaxen.core.errors import InputError


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """`flaxen train` in an empty folder beside a file of prompts; nothing may be loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    stage = set_stage(monkeypatch)

    def run(capsys, *flags):
        assert main(["train", "m", "prompts.jsonl", *flags]) == 2
        assert stage.loads == []
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] == [
            "prompts.jsonl"
        ]
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output", ""], "output is empty; expected the folder"),
        (["--output", "  "], "output is empty"),
        (["--full", "--use-dora"], "--full trains all weights, and --use-dora adapters"),
        (["--lora-rank", "0"], "settings: lora_rank is 0, expected at least 1."),
        (["--objective", "grpo"], "'grpo' needs a reward; say --reward FILE.py:NAME"),
        (["--objective", "distillation"], "needs a reference; say --reference MODEL"),
        (["--objective", "dpo", "--loss-type", "hing"], "Did you mean 'hinge'?"),
    ],
)
def test_what_cannot_be_done_is_told_before_a_model_is_loaded(flags, said, asked, capsys):
    assert said in asked(capsys, *flags)


def test_a_step_without_whole_groups_is_told_before_a_model_is_loaded(asked, tmp_path, capsys):
    (tmp_path / "r.py").write_text("def f(prompts):\n    return [0.0] * len(prompts)\n")
    said = asked(capsys, "--objective", "grpo", "--reward", "r.py:f")
    assert "Raise batch_size to 8 or accumulation to 2" in said


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("def f(:", "r.py:f", "r.py cannot be run: SyntaxError"),
        ("1 / 0", "r.py:f", "r.py cannot be run: ZeroDivisionError"),
        ("import not_there_at_all", "r.py:f", "r.py cannot be run: ModuleNotFoundError"),
        ("f = 3", "r.py:f", "r.py defines no function 'f'"),
        ("def f(): pass", "r.py:g", "r.py defines no function 'g'"),
        ("def f(): pass", "r.py", "names no function"),
        ("def f(): pass", "absent.py:f", "names no function"),
        ("f", "r.txt:f", "is no file of Python"),
    ],
)
def test_a_file_of_rewards_that_cannot_be_used_is_named(text, name, said, tmp_path):
    for suffix in ("py", "txt"):
        (tmp_path / f"r.{suffix}").write_text(text)
    with pytest.raises(InputError, match=said):
        function_of(str(tmp_path / name))


def test_the_end_of_a_run_with_rewards_tells_them(capsys):
    rows = [
        {"step": 0, "eval_reward": 0.1, "eval_reward_std": 0.3},
        {"step": 1, "reward": 0.25, "reward_std": 0.5},
        {"step": 2, "reward": 0.75, "reward_std": 0.125},
        {"step": 2, "eval_reward": 0.9, "eval_reward_std": 0.2},
    ]
    result = types.SimpleNamespace(
        rows=rows, losses=[0.0, 0.0], rewards=[0.25, 0.75], perplexities={}, finished=True, step=2
    )
    result.tokens_per_second, paths = 1.0, ("model", "adapter", "picture", "log")
    vars(result).update({f"{kind}_path": None for kind in paths})
    _tell(result)
    said = capsys.readouterr().err
    assert "Reward 0.250 ± 0.500 -> 0.750 ± 0.125" in said
    assert "Reward on held-out prompts 0.100 ± 0.300 -> 0.900 ± 0.200" in said
    assert _told(result)["rewards"] == [0.25, 0.75]
