"""Text in, text out, with a vocabulary of a few words."""

from __future__ import annotations

import pytest
import tiny

from flaxen.core.errors import InputError
from flaxen.generate import text

WORDS = ["<s>", "</s>", "ask", "xa", "bc", "d!", "bz", "end"]
ASK, XA, BC, D, BZ, END = range(2, 8)


@pytest.fixture(scope="module")
def tok():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", bos_token="<s>")


def answer(tok, *ids, **settings):
    pieces = []
    model = tiny.script([*ids], eos_token_id=1)
    result = text(model, tok, "ask", on_text=pieces.append, max_new_tokens=4, **settings)
    assert "".join(pieces) == result.text
    return result


def test_a_stop_string_over_several_tokens_never_shows(tok):
    result = answer(tok, 0, XA, BC, D, END, stop=["abcd"])
    assert (result.text, result.finish_reason) == ("x", "stop")


def test_what_only_began_like_a_stop_string_is_released(tok):
    result = answer(tok, XA, BZ, 1, stop=["abcd"])
    assert (result.text, result.finish_reason) == ("xabz", "stop")


def test_an_answer_cut_by_the_limit_says_so(tok):
    result = answer(tok, XA)
    assert (result.text, result.ids, result.finish_reason) == ("xa" * 4, [XA] * 4, "length")


def test_the_cache_of_an_answer_holds_all_its_ids(tok):
    result = answer(tok, XA)
    assert int(result.cache.lengths[0]) == 1 + 4


def test_an_empty_prompt_is_refused(tok):
    with pytest.raises(InputError, match="no tokens"):
        text(tiny.script([XA]), tok, "")
