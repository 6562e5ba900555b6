"""Tokenizers of Hugging Face folders give the same ids once they are in a GGUF file."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_words import MERGES, byte_tokens
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.convert.formats.gguf_write import write_gguf
from flaxen.core.errors import CheckpointError
from flaxen.text.gguf_tokenizer import gguf_tokenizer

TEXTS = [
    "hello hello, 1234!\n\n  and  so on\t.",
    "He's he'll HE'LL don't",
    "日本語 naïve 🎉\n",
    "<|im_start|>hello<|im_end|>x",
    " hello",
    "",
]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
# As they stand in the tokenizer.json of the models that brought them.
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
    "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# Name: (what cuts before the bytes, whether GPT-2's rule cuts on, whether whole words are taken)
CUTS = {
    "gpt-2": ([], True, False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True)], True, False),
    "llama-bpe": ([split(LLAMA3)], False, True),
    "smaug-bpe": ([split(LLAMA3)], False, False),
    "qwen2": ([split(QWEN2)], False, False),
    "tekken": ([split(TEKKEN)], False, True),
}


def byte_level(before=(), gpt2=True, whole=False, **names) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a few words; the last three tokens are special."""
    tokens = byte_tokens()
    ids = {token: i for i, token in enumerate(tokens[:-3])}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=whole))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_of])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[-3:]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def spaced(prefix: bool) -> PreTrainedTokenizerFast:
    """BPE over text whose spaces are ▁, with bytes for letters it does not have."""
    pieces = ["h", "e", "l", "o", "▁", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    backend = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    start = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<b>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def written(folder, words, rows=None, config=CONFIG, **options):
    """The GGUF file of a model with this tokenizer."""
    words.save_pretrained(folder)
    embedding = ArrayTensor(np.zeros((rows or len(words), 4), np.float32))
    path = folder / "a.gguf"
    tensors = {"model.embed_tokens.weight": embedding}
    write_gguf(tensors, config, path, kind="F32", tokenizer_folder=folder, **options)
    return path


def ids(words) -> list[list[int]]:
    return [words(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("rule", CUTS)
def test_a_byte_level_tokenizer_keeps_its_ids_and_its_rule_has_its_name(tmp_path, rule):
    words = byte_level(*CUTS[rule], bos_token="<bos>", eos_token="<|im_end|>")
    path = written(tmp_path, words)
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.pre"] == rule
    assert metadata["tokenizer.ggml.merges"] == MERGES
    assert metadata["tokenizer.ggml.tokens"] == byte_tokens()
    assert ids(gguf_tokenizer(path)) == ids(words)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_with_visible_spaces_keeps_its_ids(tmp_path, prefix):
    words = spaced(prefix)
    path = written(tmp_path, words)
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert ids(gguf_tokenizer(path)) == ids(words)


def test_scores_fall_in_the_order_of_the_merges(tmp_path):
    metadata = GgufFile(written(tmp_path, spaced(True))).metadata
    scores = dict(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True)
    )
    order = sorted(["he", "ll", "hell", "hello", "▁hello", "h"], key=lambda t: -scores[t])
    assert order == ["he", "ll", "hell", "hello", "▁hello", "h"]
    assert scores["he"] == 0.0 and scores["<0x0A>"] == 0.0 and scores["<s>"] == -1000.0


def test_token_types_tell_letters_bytes_and_commands_apart(tmp_path):
    metadata = GgufFile(written(tmp_path, spaced(True), rows=280)).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = dict(zip(tokens, metadata["tokenizer.ggml.token_type"].tolist(), strict=True))
    assert [kinds[t] for t in ("hello", "<s>", "<b>", "<0x0A>")] == [1, 3, 4, 6]
    assert len(tokens) == 280
    assert tokens[270:272] == ["[PAD270]", "[PAD271]"]
    assert kinds["[PAD270]"] == 5


def test_special_tokens_and_the_template_are_kept(tmp_path):
    words = byte_level(bos_token="<bos>", eos_token="<|im_end|>", pad_token="<|im_start|>")
    words.chat_template = "{{ messages }}"
    metadata = GgufFile(written(tmp_path, words)).metadata
    named = {k.split(".")[-1]: v for k, v in metadata.items() if k.endswith("_id")}
    first = len(words) - 3
    assert named == {
        "bos_token_id": first,
        "eos_token_id": first + 2,
        "padding_token_id": first + 1,
    }
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"


def test_of_several_templates_each_keeps_its_name(tmp_path):
    words = byte_level()
    words.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    metadata = GgufFile(written(tmp_path, words)).metadata
    assert metadata["tokenizer.chat_template"] == "{{ 1 }}"
    assert metadata["tokenizer.chat_template.tool_use"] == "{{ 2 }}"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]


def test_ids_that_the_tokenizer_leaves_open_are_the_configs(tmp_path):
    config = CONFIG | {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None}
    metadata = GgufFile(written(tmp_path, byte_level(eos_token="<bos>"), config=config)).metadata
    assert metadata["tokenizer.ggml.bos_token_id"] == 5
    assert metadata["tokenizer.ggml.eos_token_id"] == len(byte_tokens()) - 3
    assert "tokenizer.ggml.padding_token_id" not in metadata


@pytest.mark.parametrize(
    ("form", "bos", "eos"), [("$A", 0, 0), ("<s> $A", 1, 0), ("<s> $A </s>", 1, 1)]
)
def test_what_is_put_around_a_text_is_said(tmp_path, form, bos, eos):
    words = spaced(True)
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single=form, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    path = written(tmp_path, words)
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.add_bos_token"] is bool(bos)
    assert metadata["tokenizer.ggml.add_eos_token"] is bool(eos)
    assert ids(gguf_tokenizer(path)) == ids(words)


def test_other_words_around_a_text_are_refused(tmp_path):
    words = spaced(True)
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 2)]
    )
    with pytest.raises(CheckpointError, match="more than BOS 1 and EOS 2 around"):
        written(tmp_path, words)


def test_a_rule_without_a_name_must_be_passed(tmp_path):
    words = byte_level([split("[0-9]")], True)
    with pytest.raises(CheckpointError, match="has no name known here.*pass that name as `pre`"):
        written(tmp_path, words)
    path = written(tmp_path, words, pre="smollm")
    assert GgufFile(path).metadata["tokenizer.ggml.pre"] == "smollm"


def test_added_tokens_without_a_row_are_left_out(tmp_path):
    words = byte_level()
    metadata = GgufFile(written(tmp_path, words, rows=len(words) - 1)).metadata
    assert metadata["tokenizer.ggml.tokens"] == byte_tokens()[:-1]


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="ids up to 261, but the model embeds 100"):
        written(tmp_path, byte_level(), rows=100)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    )
    with pytest.raises(CheckpointError, match="of kind WordLevel; only BPE"):
        written(tmp_path, words)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    tensors = {"model.embed_tokens.weight": ArrayTensor(np.zeros((5, 4), np.float32))}
    with pytest.raises(CheckpointError, match="no tokenizer can be made of it"):
        write_gguf(tensors, CONFIG, tmp_path / "a.gguf", tokenizer_folder=tmp_path)
