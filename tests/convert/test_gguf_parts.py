"""Models in several GGUF files."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_files import HIDDEN, random, write

from flaxen.convert.formats.gguf import open_gguf
from flaxen.core.errors import CheckpointError

STORED = {
    "output_norm.weight": random(HIDDEN),
    "blk.0.ffn_up.weight": random(6, HIDDEN),
    "blk.0.ffn_down.weight": random(HIDDEN, 6),
}


def parts(folder, numbers=(0, 1, 2), names=tuple(STORED), total=4):
    """Three files with one tensor each; the first also has the embedding."""
    paths = [folder / f"tiny-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):

        def split(writer, number=numbers[i]):
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 3)
            writer.add_int32("split.tensors.count", total)

        tensors = {names[i]: STORED[names[i]]}
        write(path, "llama", tensors, split, embedding=i == 0)
    return paths


@pytest.mark.parametrize("named", [0, 2])
def test_any_part_opens_the_whole_model(tmp_path, named):
    checkpoint = open_gguf(parts(tmp_path)[named])
    assert checkpoint.config["hidden_size"] == HIDDEN
    assert sorted(checkpoint) == [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    for hub, name in (("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")):
        np.testing.assert_array_equal(
            checkpoint[f"model.layers.0.{hub}.weight"].read(), STORED[f"blk.0.{name}.weight"]
        )


def test_a_missing_part_is_named(tmp_path):
    paths = parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"missing beside it: tiny-00002-of-00003\.gguf"):
        open_gguf(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path):
    first, *_ = parts(tmp_path)
    with pytest.raises(CheckpointError, match=r"must be named NAME-00001-of-00003\.gguf"):
        open_gguf(first.rename(tmp_path / "model.gguf"))


def test_a_part_of_another_place_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"00003-of-00003.gguf: says it is part 1 "):
        open_gguf(parts(tmp_path, numbers=(0, 1, 1))[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    twice = ("output_norm.weight", "blk.0.ffn_up.weight", "blk.0.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' is in another part too"):
        open_gguf(parts(tmp_path, names=twice)[0])


def test_parts_that_hold_too_little_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="hold 4 tensors, not the 9"):
        open_gguf(parts(tmp_path, total=9)[0])
