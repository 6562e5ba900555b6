"""What each command asks of the library and what it prints; the model says what it is told."""

from __future__ import annotations

import io
import json

import pytest
from cli.stubs import Tokenizer, set_stage

from flaxen.cli import main
from flaxen.cli.chat import Conversation, converse


def test_generate_prints_the_answer_as_it_comes(monkeypatch, capsys):
    stage = set_stage(monkeypatch)
    assert main(["generate", "m", "Capital of France?", "--system-prompt", "Be brief."]) == 0
    said = capsys.readouterr()
    assert said.out == "Paris.\n"
    assert "answer 6 tokens, 12.0 tokens/s" in said.err and "peak memory" in said.err
    assert stage.prompts == ["system: Be brief.\nuser: Capital of France?\nassistant: "]


def test_generate_passes_on_only_what_was_asked(monkeypatch):
    stage = set_stage(monkeypatch)
    main(["generate", "m", "Hi", "--temperature", "0.7", "--top-k", "5", "--max-tokens", "2k"])
    assert stage.options == [{"max_new_tokens": 2000, "temperature": 0.7, "top_k": 5}]
    main(["generate", "m", "Hi", "--dtype", "bfloat16"])
    assert stage.loads[-1] == {"source": "m", "dtype": "bfloat16", "attention": "auto"}


def test_generate_reads_a_raw_prompt_from_standard_input(monkeypatch, capsys):
    stage = set_stage(monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert main(["generate", "m", "-", "--raw", "--json"]) == 0
    assert stage.prompts == ["Once upon"]
    written = json.loads(capsys.readouterr().out)
    assert (written["text"], written["tokens"], written["prompt_tokens"]) == ("Paris.", 6, 9)


def test_generate_ends_before_a_stop_string(monkeypatch, capsys):
    set_stage(monkeypatch, says="Paris. Or")
    main(["generate", "m", "Hi", "--stop", "."])
    assert capsys.readouterr().out == "Paris\n"


def test_a_model_without_a_chat_template_is_told_about_raw(monkeypatch, capsys):
    stage = set_stage(monkeypatch, tokenizer=Tokenizer())
    monkeypatch.setattr(stage.tokenizer, "chat_template", None)
    assert main(["generate", "m", "Hi"]) == 2
    assert "--raw" in capsys.readouterr().err
    assert all(load["abstract"] for load in stage.loads), "no weights for nothing"


def test_an_empty_prompt_is_refused_before_loading(monkeypatch, capsys):
    stage = set_stage(monkeypatch)
    assert main(["generate", "m", " "]) == 2
    assert "empty" in capsys.readouterr().err
    assert stage.loads == []


def talk(monkeypatch, lines: list[str], stop: str = "", **given):
    stage = set_stage(monkeypatch, **given)
    waiting = iter(lines)

    def read(_: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    options = {"max_tokens": 9, "stop": stop, "sampling": {}}
    conversation = Conversation(stage.model, stage.tokenizer, options)
    converse(conversation, read)
    return stage, conversation


def test_the_second_turn_computes_only_what_is_new(monkeypatch):
    stage, _ = talk(monkeypatch, ["One?", "Two?"], says="Yes")
    assert stage.prompts == ["user: One?\nassistant: ", "\nuser: Two?\nassistant: "]
    assert stage.cached == [None, "cache after Yes"]


def test_an_answer_that_reads_back_differently_is_computed_again(monkeypatch):
    # A stop string is in the cache, but not in the conversation.
    stage, _ = talk(monkeypatch, ["One?", "Two?"], says="Yes.", stop=".")
    assert stage.prompts[1] == "user: One?\nassistant: Yes\nuser: Two?\nassistant: "
    assert stage.cached == [None, None]


def test_a_changed_system_prompt_begins_again(monkeypatch):
    stage, conversation = talk(monkeypatch, ["One?", "/system Be kind.", "Two?"])
    assert stage.prompts[1] == "system: Be kind.\nuser: Two?\nassistant: "
    assert [m["content"] for m in conversation.messages] == ["Two?", "Paris."]


def test_a_conversation_is_saved_as_training_data(monkeypatch, tmp_path):
    path = tmp_path / "talk.jsonl"
    talk(monkeypatch, ["One?", f"/save {path}", "/exit", "never read"])
    assert json.loads(path.read_text()) == {
        "messages": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Paris."},
        ]
    }


def test_show_prints_parts_bytes_per_device_and_attention(monkeypatch, capsys):
    stage = set_stage(monkeypatch)
    assert main(["show", "m", "--mesh", "fsdp=2,tp=2"]) == 0
    printed = capsys.readouterr().out
    assert "{0...1}" in printed and "on each of 4 devices" in printed
    assert "prefill" in printed and "chosen" in printed
    assert stage.loads[0]["abstract"]


def test_show_writes_json(monkeypatch, capsys):
    set_stage(monkeypatch)
    main(["show", "m", "--mesh", "tp=2", "--json"])
    written = json.loads(capsys.readouterr().out)
    assert written["bytes_per_device"] == written["bytes"] // 2
    assert written["attention"]["decode"][0]["layers"] == 2


def test_train_refuses_absent_data_before_loading(monkeypatch, capsys):
    stage = set_stage(monkeypatch)
    assert main(["train", "m", "absent.jsonl"]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    assert stage.loads == []


def test_train_refuses_full_with_a_rank(monkeypatch, capsys):
    set_stage(monkeypatch)
    assert main(["train", "m", "x.jsonl", "--full", "--lora-rank", "4"]) == 2
    assert "--lora-rank" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_unknown_flag_is_refused(command: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "m", "--tempurature", "1"])
    assert stopped.value.code == 2
    assert "--tempurature" in capsys.readouterr().err


def test_convert_does_not_replace_a_model_unasked(monkeypatch, capsys, tmp_path):
    set_stage(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    assert main(["convert", "m", str(tmp_path)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_a_conversation_that_cannot_be_saved_goes_on(monkeypatch, capsys, tmp_path):
    set_stage(monkeypatch)
    lines = iter([f"/save {tmp_path}/no/such/folder.json", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "m"]) == 0
    assert "Cannot write" in capsys.readouterr().err
