"""Tokenizers from GGUF files and folders."""

from __future__ import annotations

import json

import pytest
from tiny_words import MERGES, byte_tokens, write_words

from flaxen.core.errors import CheckpointError
from flaxen.text import decode, encode, tokenizer

TEXTS = ["hello hello", "Hé 😀\n\n x", " \t1234", "<|im_start|>hello<|im_end|>", ""]


def ids_of(*tokens: str) -> list[int]:
    return [byte_tokens().index(token) for token in tokens]


def test_byte_level_merges_in_the_order_of_the_file(tok):
    assert encode(tok, "hello hello<|im_end|>") == ids_of("hello", "Ġhello", "<|im_end|>")


@pytest.mark.parametrize("text", TEXTS[:3])
def test_text_comes_back_exactly(tok, piece_tok, text):
    assert decode(tok, encode(tok, text)) == text
    assert decode(piece_tok, encode(piece_tok, text)) == text


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(piece_tok):
    tokens = piece_tok.convert_ids_to_tokens(encode(piece_tok, "hello é"))
    assert tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]


def test_the_better_score_is_joined_first(piece_tok):
    assert piece_tok.tokenize("hel") == ["▁", "he", "l"]


def test_user_defined_tokens_are_found_before_the_text_is_cut(piece_tok):
    tokens = piece_tok.convert_ids_to_tokens(encode(piece_tok, "he  llo"))
    assert tokens == ["<s>", "▁", "he", "  ", "▁", "llo"]
    assert decode(piece_tok, encode(piece_tok, "he  ")) == "he  "


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["12345", "Ġa", "'", "S"]),
        ("smollm", ["1", "2", "3", "4", "5", "Ġa", "'", "S"]),
        ("llama-bpe", ["123", "45", "Ġa", "'S"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġa", "'S"]),
        ("deepseek-llm", ["12345", "Ġa", "'", "S"]),
        ("deepseek-coder", ["1", "2", "3", "4", "5", "Ġa", "'", "S"]),
        ("deepseek-v3", ["123", "45", "Ġa", "'S"]),
        ("falcon", ["123", "45", "Ġa", "'", "S"]),
        ("mpt", ["12345", "Ġa", "'", "S"]),
        ("gpt-4o", ["123", "45", "Ġa'S"]),
        ("tiny_aya", ["12", "345", "Ġa'S"]),
        ("bloom", ["12345", "Ġa'S"]),
        ("viking", ["1", "2", "3", "4", "5", "Ġa'S"]),
    ],
)
def test_the_rule_decides_how_text_is_cut(tmp_path, rule, pieces):
    path = write_words(
        tmp_path / "a.gguf",
        "gpt2",
        byte_tokens(),
        [1] * len(byte_tokens()),
        lambda w: (w.add_tokenizer_pre(rule), w.add_token_merges(MERGES)),
    )
    cut = tokenizer(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345 a'S")
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("file", ["byte_file", "piece_file"])
def test_a_saved_tokenizer_loads_again_equal(request, tmp_path, file, model_type):
    first = tokenizer(request.getfixturevalue(file))
    first.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text(json.dumps({"model_type": model_type}))
    again = tokenizer(tmp_path / "saved")
    assert again.special_tokens_map == first.special_tokens_map
    assert again.chat_template == first.chat_template
    for text in TEXTS:
        assert encode(again, text) == encode(first, text)
        assert decode(again, encode(again, text)) == decode(first, encode(first, text))


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "▁wor", "ld", "▁,", "▁中", "▁un2"]


def test_wordpiece_marks_what_goes_on_and_stands_between_cls_and_sep(tmp_path):
    def special(w):
        w.add_bos_token_id(2)
        w.add_sep_token_id(3)
        w.add_unk_token_id(1)
        w.add_pad_token_id(0)

    path = write_words(tmp_path / "a.gguf", "bert", WORDS, [3, 2, 3, 3, *[1] * 6], special)
    words = tokenizer(path)
    ids = [words.convert_tokens_to_ids(t) for t in ("[CLS]", "wor", "##ld", ",", "中", "[UNK]")]
    assert ids == [2, 5, 6, 7, 8, 1]
    assert words("WÖRLD,中 x").input_ids == [*ids, 3]
    assert words.decode([5, 6, 7]) == "world,"


def test_bpe_of_characters_joins_across_words_but_not_lines(tmp_path):
    tokens = [
        "<unk>",
        "▁",
        "a",
        "b",
        "\n",
        "a▁",
        "a▁b",
        "\n\n",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    merges = lambda w: (w.add_token_merges(["a ▁", "a▁ b"]), w.add_unk_token_id(0))
    path = write_words(tmp_path / "a.gguf", "gemma4", tokens, [2, *[1] * 7, *[6] * 256], merges)
    words = tokenizer(path)
    ids = words.encode("a b\n\nbé", add_special_tokens=False)
    assert words.convert_ids_to_tokens(ids) == ["a▁b", "\n\n", "b", "<0xC3>", "<0xA9>"]
    assert words.decode(ids) == "a b\n\nbé"


def test_bos_is_added_once(piece_tok):
    bos = piece_tok.bos_token_id
    assert encode(piece_tok, "hello").count(bos) == 1
    assert encode(piece_tok, "<s>hello").count(bos) == 1
    assert encode(piece_tok, "<s>hello")[0] == bos


def test_a_bos_written_twice_stays(piece_tok):
    piece_tok.add_bos_token = False
    assert encode(piece_tok, "<s><s>hello").count(piece_tok.bos_token_id) == 2


def test_a_length_limit_in_the_tokenizer_file_does_not_cut(tok):
    tok.backend_tokenizer.enable_truncation(4)
    assert len(encode(tok, "x" * 50)) == 50


def test_an_unknown_cutting_rule_is_refused(tmp_path):
    path = write_words(
        tmp_path / "a.gguf", "gpt2", ["a"], [1], lambda w: w.add_tokenizer_pre("smolm")
    )
    with pytest.raises(CheckpointError, match="Did you mean 'smollm'"):
        tokenizer(path)


@pytest.mark.parametrize(
    ("model", "extra", "match"),
    [
        ("rwkv", lambda w: None, "of kind 'rwkv'"),
        ("llama", lambda w: None, "without scores"),
        ("llama", lambda w: w.add_token_scores([0.0]), "2 tokens but 1 token scores"),
        ("gpt2", lambda w: w.add_bos_token_id(9), "past its 2 tokens"),
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_refused(tmp_path, model, extra, match):
    path = write_words(tmp_path / "a.gguf", model, ["a", "b"], [1, 1], extra)
    with pytest.raises(CheckpointError, match=match):
        tokenizer(path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        tokenizer(tmp_path)
