"""Text appears token by token, never wrong and never late without reason."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flaxen.core.errors import InputError
from flaxen.text import TextStream, decode, encode


def pieces(tok, ids, **options) -> list[str]:
    stream = TextStream(tok, **options)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", ["\u010f", "😀", "a😀b", "❤\ufe0f!", "e\u0301", "日本語"])
@pytest.mark.parametrize("kind", ["tok", "piece_tok"])
def test_characters_over_several_tokens_come_whole(request, kind, text):
    tok = request.getfixturevalue(kind)
    found = pieces(tok, encode(tok, text))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_text_is_given_as_soon_as_it_is_certain(tok):
    assert pieces(tok, encode(tok, "hello é hello")) == ["hello", " ", "", "é", " hello", ""]


@pytest.mark.parametrize("kind", ["tok", "piece_tok"])
def test_an_end_in_the_middle_of_a_character_equals_the_full_decode(request, kind):
    tok = request.getfixturevalue(kind)
    ids = encode(tok, "he😀😀")[:-1]
    found = pieces(tok, ids)
    assert "".join(found) == decode(tok, ids)
    assert not any("\ufffd" in piece for piece in found[:-1])


@pytest.mark.parametrize("kind", ["tok", "piece_tok"])
def test_any_ids_in_any_portions_join_to_the_full_decode(request, kind):
    tok = request.getfixturevalue(kind)
    rng = random.Random(0)
    for _ in range(60):
        ids = [rng.randrange(len(tok)) for _ in range(rng.randrange(1, 90))]
        stream, text, at = TextStream(tok), "", 0
        while at < len(ids):
            step = rng.randrange(1, 4)
            text += stream.push(np.array(ids[at : at + step]))
            at += step
        assert text + stream.finish() == decode(tok, ids)


def test_the_work_does_not_grow_with_what_was_said_before(tok, monkeypatch):
    lengths = []

    def counted(tok, ids):
        lengths.append(len(ids))
        return decode(tok, ids)

    monkeypatch.setattr("flaxen.text.streaming.decode", counted)
    pieces(tok, encode(tok, "é hello 😀\n" * 60))
    assert max(lengths) < 40


def streamed(tok, parts: list[str], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(tok, stop=stop)
    out = [stream.push(encode(tok, part)) for part in parts]
    return [*out, stream.finish()], stream.stopped


def test_a_stop_string_over_several_pieces_is_held_back(tok):
    assert streamed(tok, ["xa", "bc", "d!"], ["abcd"]) == (["x", "", "", ""], True)


def test_what_only_began_like_a_stop_string_is_released(tok):
    assert streamed(tok, ["xa", "bz"], ["abcd"]) == (["x", "abz", ""], False)
    assert streamed(tok, ["xab"], ["abcd"]) == (["x", "ab"], False)


def test_the_stop_string_that_is_complete_first_counts(tok):
    assert streamed(tok, ["xabcdef"], ["abcdef", "bcd"]) == (["xa", ""], True)
    assert streamed(tok, ["xab", "cd", "ef"], ["abcdef", "bcd"]) == (["x", "a", "", ""], True)


def test_a_beginning_within_a_beginning_is_kept(tok):
    assert streamed(tok, ["aa", "ab"], ["aab"]) == (["", "a", ""], True)


def test_a_stop_string_that_is_a_special_token_stops_there(tok):
    stream = TextStream(tok, stop=["<|im_end|>"])
    assert stream.push(encode(tok, "hello<|im_end|> hello")) == "hello"
    assert stream.stopped and stream.push(encode(tok, "x")) == "" and stream.finish() == ""


def test_streams_of_two_rows_do_not_see_each_other(tok):
    rows = [TextStream(tok, stop=["ab"]) for _ in range(2)]
    texts = [row.push(encode(tok, part)) for row, part in zip(rows, ["xa", "by"], strict=True)]
    assert texts == ["x", "by"]
    assert [row.stopped for row in rows] == [False, False]
    assert rows[0].push(encode(tok, "b")) == ""
    assert [row.stopped for row in rows] == [True, False]


@pytest.mark.parametrize("stop", ["abc", [""], ["a", ""]])
def test_stop_must_be_a_list_of_strings_with_something_in_them(tok, stop):
    with pytest.raises(InputError, match="list of strings"):
        TextStream(tok, stop=stop)
