"""A real file, for those who have it: FLAXEN_SMOLLM2=path/to/SmolLM2-135M-Instruct.Q4_1.gguf."""

from __future__ import annotations

import os

import gguf
import numpy as np
import pytest

from flaxen.convert.formats.gguf import open_gguf
from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.text import decode, encode, encode_chat, tokenizer

PATH = os.environ.get("FLAXEN_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not PATH, reason="FLAXEN_SMOLLM2 names no file")

# The tokens of the question below as the model's own tokenizer makes them, system text included.
QUESTION_IDS = [
    *[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411],
    *[407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198],
    *[1, 520, 9531, 198],
]


def test_every_tensor_has_its_shape_and_the_packages_values():
    checkpoint, file = open_gguf(PATH), GgufFile(PATH)
    assert len(checkpoint) == 272
    assert sum(tensor.size for tensor in checkpoint.values()) == 134_515_008
    entry = file.tensors["blk.17.ffn_down.weight"]
    raw = np.frombuffer(file.buffer, np.uint8)[entry.start : entry.start + entry.bytes]
    whole = gguf.dequantize(raw.reshape(576, -1), gguf.GGMLQuantizationType.Q4_1)
    tensor = checkpoint["model.layers.17.mlp.down_proj.weight"]
    box = (slice(100, 107), slice(33, 1500))
    np.testing.assert_array_equal(tensor.read(box), whole[box])


def test_the_question_and_the_novel_have_their_ids():
    tok = tokenizer(PATH)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert encode_chat(tok, question) == QUESTION_IDS
    novel = "CHAPTER 1. Loomings.\n\nCall"
    assert encode(tok, novel) == [*[5229, 41958, 216, 33, 30, 450, 6364, 616, 30, 198, 198, 12800]]
    assert decode(tok, encode(tok, novel)) == novel
