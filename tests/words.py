"""A tokenizer of a few words, whose padding is its EOS."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "user", "a", "b", "c", "d", "assistant"]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def word_tokenizer(words: int = len(WORDS)) -> PreTrainedTokenizerFast:
    """Ids are places in `WORDS`; beyond them, `w9`, `w10`, ..."""
    every = WORDS + [f"w{i}" for i in range(len(WORDS), words)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(every)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
