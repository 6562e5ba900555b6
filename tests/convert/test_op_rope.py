"""Rows of query and key projections between rotary pairs and rotary halves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from counting import Source

from flaxen.convert import ops
from flaxen.convert.lazy import LazyTensor


def permute(
    array: np.ndarray | LazyTensor,
    config,
    name: str = "q_proj.weight",
    **settings,
) -> LazyTensor:
    tensor = Source(np.array(array)) if isinstance(array, np.ndarray) else array
    operation = ops.PermuteForRope(**settings)
    found = operation.convert({name: [tensor]}, [name], [name], config=config)[name]
    assert isinstance(found, LazyTensor)
    return found


def rotated(vector: np.ndarray, position: int, pairs: bool) -> np.ndarray:
    """A head's vector turned by its position: neighbours together, or halves, in float64."""
    half = len(vector) // 2
    angle = position / 10000.0 ** (np.arange(half) / half)
    if pairs:
        first, second = vector[0::2], vector[1::2]
    else:
        first, second = vector[:half], vector[half:]
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
    )


@pytest.mark.parametrize("position", [0, 30])
def test_attention_scores_by_halves_are_those_by_pairs(position: int):
    rng = np.random.default_rng(0)
    heads, grouped, head_dim, width = 4, 2, 8, 16
    config = SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=grouped, head_dim=head_dim
    )
    wq, wk = (
        rng.standard_normal((heads * head_dim, width)),
        rng.standard_normal((grouped * head_dim, width)),
    )
    x, y = rng.standard_normal((2, width))
    scores = []
    for pairs in (True, False):
        q = wq if pairs else permute(wq, config).read()
        k = wk if pairs else permute(wk, config, "k_proj.weight").read()
        queries = (q @ x).reshape(heads, head_dim)
        keys = np.repeat((k @ y).reshape(grouped, head_dim), heads // grouped, axis=0)
        scores.append(
            [
                rotated(a, position, pairs) @ rotated(b, 3, pairs)
                for a, b in zip(queries, keys, strict=True)
            ]
        )
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-12)


@pytest.mark.parametrize("shape", [(32, 5), (32,)], ids=["weight", "bias"])
@pytest.mark.parametrize("inverse", [False, True])
def test_permuting_back_restores_every_bit(shape, inverse: bool):
    config = SimpleNamespace(num_attention_heads=4)
    array = np.random.default_rng(1).standard_normal(shape)
    there = permute(array, config, inverse=inverse)
    assert (there.read() != array).any()
    np.testing.assert_array_equal(permute(there, config, inverse=not inverse).read(), array)


def test_the_first_elements_of_a_heads_pairs_come_first():
    rows = permute(np.arange(16.0), SimpleNamespace(num_attention_heads=2)).read()
    np.testing.assert_array_equal(rows, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15])


GROUPED = {
    "head_dim": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    "hidden_size": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16},
    "names only": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
TWO_HEADS_OF_FOUR = [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("name", ["k_proj.weight", "attn.wk.bias", "layers.0.key.weight"])
def test_a_grouped_key_has_the_heads_of_keys(kind: str, name: str):
    for config in (GROUPED[kind], SimpleNamespace(**GROUPED[kind])):
        rows = permute(np.arange(8.0), config, name).read()
        np.testing.assert_array_equal(rows, TWO_HEADS_OF_FOUR)


@pytest.mark.parametrize("kind", GROUPED)
def test_a_query_beside_grouped_keys_has_the_heads_of_queries(kind: str):
    rows = permute(np.arange(16.0), GROUPED[kind], "q_proj.weight").read()
    np.testing.assert_array_equal(
        rows, [*TWO_HEADS_OF_FOUR, *(8 + row for row in TWO_HEADS_OF_FOUR)]
    )


def test_only_the_named_layers_are_permuted():
    config = {"num_attention_heads": 1}
    tensors = {key: [Source(np.arange(4.0))] for key in ("q_proj", "v_proj")}
    operation = ops.PermuteForRope(permute_layer_names=["q_proj", "k_proj"])
    found = operation.convert(tensors, list(tensors), ["qkv"], config=config)
    np.testing.assert_array_equal(found["q_proj"].read(), [0, 2, 1, 3])
    assert found["v_proj"] is tensors["v_proj"]


def test_a_fused_vision_projection_comes_apart_permuted_and_back():
    config = {"vision_config": {"num_attention_heads": 2}}
    fused, parts = Source(np.arange(24.0)), ["q_proj", "k_proj", "v_proj"]
    unfuse = ops.VisionUnfuseAndPermuteForRope(permute_layer_names=["q_proj", "k_proj"])
    found = unfuse.convert({"qkv": [fused]}, ["qkv"], parts, config=config)
    np.testing.assert_array_equal(found["q_proj"].read(), TWO_HEADS_OF_FOUR)
    np.testing.assert_array_equal(found["k_proj"].read(), 8.0 + np.array(TWO_HEADS_OF_FOUR))
    np.testing.assert_array_equal(found["v_proj"].read(), np.arange(16.0, 24.0))
    back = unfuse.reverse_op.convert(found, parts, ["qkv"], config=config)
    np.testing.assert_array_equal(back["qkv"].read(), fused.array)


@pytest.mark.parametrize("box", [(0, 64), (16, 32)])
def test_whole_heads_are_read_at_once_not_row_by_row(box: tuple[int, int]):
    source = Source(np.arange(64.0 * 3).reshape(64, 3))
    permute(source, {"num_attention_heads": 4}).read((slice(*box), slice(0, 3)))
    assert source.reads == 1


def test_parts_of_heads_are_strided_copies_of_mapped_memory():
    source = Source(np.arange(64.0 * 3).reshape(64, 3), shows_memory=True)
    found = permute(source, {"num_attention_heads": 4}).read((slice(5, 41), slice(0, 3)))
    assert source.reads <= 2 and source.counter.total == found.nbytes
