"""What is learned from can be looked at before it is."""

from __future__ import annotations

import io
import json

import pytest
from words import TEMPLATE, word_tokenizer

from flaxen.cli import main
from flaxen.cli.output import marks

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tok = word_tokenizer()
    tok.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("model")
    tok.save_pretrained(path)
    return str(path)


@pytest.fixture
def data(tmp_path):
    def write(*records):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


def test_a_chat_is_shown_with_what_is_learned_of_it(folder, data, capsys):
    path = data({"text": "a"}, {"messages": TALK})
    assert main(["data", "show", path, "--model", folder, "--index", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["where"] == f"{path}:2"
    assert shown["tokens"]["ids"] == [3, 4, 2, 8, 5, 2]
    assert shown["tokens"]["learned"] == [0, 0, 0, 0, 1, 1]
    assert "".join(shown["tokens"]["texts"]) == "user a </s> assistant b </s>"


def test_the_first_token_is_never_learned(folder, data, capsys):
    assert main(["data", "show", data({"text": "a b"}), "--model", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"]["learned"] == [0, 1, 1]


def test_learned_tokens_are_green(folder, data, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["data", "show", data({"messages": TALK}), "--model", folder]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[32m b" in printed  # green
    assert "\x1b[1;32m </s>" in printed  # and bold, as it is special
    assert "\x1b[2m a" in printed  # dim


def test_without_colours_what_is_learned_stands_in_marks(folder, data, capsys):
    path = data({"messages": [*TALK, *TALK]})
    assert main(["data", "show", path, "--model", folder]) == 0
    said = capsys.readouterr()
    turn = "user a </s> assistant⟦ b </s>⟧"
    assert f"{turn} {turn}" in said.out
    assert "⟦ ⟧ is learned" in said.err


def test_no_color_is_honoured_on_a_terminal(folder, data, capsys, monkeypatch):
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    assert main(["data", "show", data({"messages": TALK}), "--model", folder]) == 0
    printed = capsys.readouterr().out
    assert "⟦" in printed and "32m" not in printed


def test_an_encoding_without_the_marks_gets_others(monkeypatch):
    for encoding, found in (("utf-8", ("⟦", "⟧")), ("latin-1", ("[[", "]]"))):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        assert marks() == found


def test_a_prompt_that_is_asked_is_shown(folder, data, capsys):
    path = data({"prompt": "a b"})
    assert main(["data", "show", path, "--model", folder, "--objective", "grpo", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["prompt"]["ids"], shown["prompt"]["learned"]) == ([4, 5], [0, 0])


def test_ids_are_shown_line_by_line(folder, data, capsys):
    assert main(["data", "show", data({"messages": TALK}), "--model", folder, "--ids"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "5  learned  ' b'" in [line.strip() for line in lines]


def test_answers_of_a_pair_are_shown_both(folder, data, capsys):
    path = data({"prompt": "a", "chosen": "b c", "rejected": "d"})
    assert main(["data", "show", path, "--model", folder, "--objective", "dpo", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["chosen_ids"]["ids"] == [4, 5, 6, 2]
    assert shown["chosen_ids"]["learned"] == [0, 1, 1, 1]
    assert shown["rejected_ids"]["ids"] == [4, 7, 2]


def test_a_judged_answer_is_shown_with_its_label(folder, data, capsys):
    path = data({"prompt": "a", "completion": "b", "label": True})
    assert main(["data", "show", path, "--model", folder, "--objective", "kto", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ids"]["ids"] == [4, 5, 2]
    assert shown["ids"]["learned"] == [0, 1, 1]


@pytest.mark.parametrize(
    ("index", "found"), [("1", "a.jsonl:2: found the keys 'body'"), ("7", "There are 2 records")]
)
def test_what_cannot_be_shown_is_told(folder, data, capsys, index, found):
    path = data({"text": "a"}, {"body": "b"})
    assert main(["data", "show", path, "--model", folder, "--index", index]) == 2
    assert found in capsys.readouterr().err.replace("\n", "")


def test_columns_are_said_by_flags(folder, data, capsys):
    path = data({"q": "a", "r": "b"})
    names = ["--columns", "prompt=q", "--columns", "completion=r"]
    assert main(["data", "show", path, "--model", folder, "--json", *names]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"]["ids"] == [4, 5, 2]
    assert main(["data", "show", path, "--model", folder, "--columns", "prompt"]) == 2
    assert "lacks a '='" in capsys.readouterr().err


def test_statistics_count_everything(folder, data, capsys):
    path = data({"text": "a b c"}, {"messages": TALK}, {"text": "a"}, {"text": "b"})
    command = ["data", "stats", path, "--model", folder, "--seq-len", "6"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["learned"]) == (4, 14, 10)
    assert found["lengths"] == {"least": 2, "median": 3.0, "mean": 3.5, "most": 6}
    assert found["histogram"] == {"2": 2, "4": 1, "8": 1}
    assert (found["rows_packed"], found["examples"]) == (3, 4)
    assert found["full_packed"] == pytest.approx(14 / 18)
    assert found["full_padded"] == pytest.approx(14 / 24)
    assert main(command) == 0
    assert "77.8% full" in capsys.readouterr().out


def numbers(capsys, path, folder, objective, *more):
    command = ["data", "stats", path, "--model", folder, "--objective", objective, *more]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    return found, capsys.readouterr().out


def test_pairs_are_counted_by_their_parts(folder, data, capsys):
    path = data(
        {"prompt": "a", "chosen": "b c", "rejected": "d"},
        {"prompt": "a b c", "chosen": "d", "rejected": "d c b a"},
    )
    found, printed = numbers(capsys, path, folder, "dpo", "--seq-len", "4")
    assert found["records"] == 2
    assert found["lengths"]["prompt"] == {"least": 1, "median": 2.0, "mean": 2.0, "most": 3}
    # Answers have their end.
    assert found["lengths"]["chosen"]["mean"] == 2.5 and found["lengths"]["rejected"]["most"] == 5
    assert (found["rows"], found["overlong"]) == (4, 2)  # of 4, 3, 5 and 8 tokens
    assert found["histogram"] == {"4": 2, "8": 2}
    assert "Tokens of chosen: 2 to 3" in printed and "2 of 4 rows are longer than 4" in printed


@pytest.mark.parametrize(
    ("objective", "record", "parts"),
    [
        ("kto", {"prompt": "a", "completion": "b", "label": True}, {"prompt": 1, "completion": 2}),
        ("grpo", {"prompt": "a b", "answer": 3}, {"prompt": 2}),
        ("grpo", {"messages": TALK[:1]}, {"prompt": 4}),
        ("masked", {"text": "a b c"}, {"text": 3}),
        (
            "embedding",
            {"query": "a", "positive": "b c", "negatives": ["d", "a b c"]},
            {"query": 1, "positive": 2, "negative": 2},
        ),
    ],
)
def test_records_of_every_objective_have_statistics(folder, data, capsys, objective, record, parts):
    found, _ = numbers(capsys, data(record), folder, objective)
    assert {name: each["mean"] for name, each in found["lengths"].items()} == parts


def test_labels_are_counted(folder, data, capsys):
    path = data(*({"text": "a", "label": label} for label in (1, 0, 1, 2)))
    found, printed = numbers(capsys, path, folder, "classification")
    assert found["labels"] == {"0": 1, "1": 2, "2": 1}
    assert "label 1: 2 (50.0%)" in printed


def test_a_setting_that_an_objective_does_not_read_is_refused(folder, data, capsys):
    path = data({"text": "a", "label": 0})
    more = ["--objective", "classification", "--train-on", "all"]
    assert main(["data", "stats", path, "--model", folder, *more]) == 2
    assert "train_on is 'all'" in capsys.readouterr().err
