"""What stays computes what it did."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DATA

from flaxen.attention import Scene
from flaxen.core.errors import InputError
from flaxen.core.tree import is_param, paths, rebuild
from flaxen.layers.attention import Attention, attention
from flaxen.layers.context import Context
from flaxen.layers.conv1d import Conv1D
from flaxen.layers.linear import Linear
from flaxen.layers.pruning import (
    find_pruneable_heads_and_indices,
    prune_conv1d_layer,
    prune_heads,
    prune_layer,
    prune_linear_layer,
)
from flaxen.layers.rope import rope

A = np.load(DATA / "unit" / "misc.npz")
LINEAR = Linear(weight=jnp.asarray(A["prune/lin/w"]), bias=jnp.asarray(A["prune/lin/b"]))


@pytest.mark.parametrize("dim", [0, 1])
def test_linear_equals_torch(dim):
    got = prune_linear_layer(LINEAR, A[f"prune/ix{dim}"], dim)
    np.testing.assert_array_equal(got.weight, A[f"prune/p{dim}/w"])
    np.testing.assert_array_equal(got.bias, A[f"prune/p{dim}/b"])


def test_a_layer_without_bias():
    got = prune_linear_layer(dataclasses.replace(LINEAR, bias=None), [5, 0])
    np.testing.assert_array_equal(got.weight, A["prune/lin/w"][[5, 0]])
    assert got.bias is None


def test_conv1d_is_a_linear_layer_turned():
    turned = Conv1D(weight=LINEAR.weight.T, bias=LINEAR.bias)
    out, inner = prune_conv1d_layer(turned, [4, 1]), prune_conv1d_layer(turned, [2, 0], dim=0)
    np.testing.assert_array_equal(out.weight.T, A["prune/lin/w"][[4, 1]])
    np.testing.assert_array_equal(out.bias, A["prune/lin/b"][[4, 1]])
    np.testing.assert_array_equal(inner.weight.T, A["prune/lin/w"][:, [2, 0]])
    np.testing.assert_array_equal(inner.bias, A["prune/lin/b"])


def test_outputs_are_pruned_unless_told():
    turned = Conv1D(weight=LINEAR.weight.T, bias=LINEAR.bias)
    assert prune_layer(LINEAR, [1]).weight.shape == (1, 4)
    assert prune_layer(turned, [1]).weight.shape == (4, 1)
    assert prune_layer(LINEAR, [1], dim=1).weight.shape == (6, 1)
    assert prune_layer(turned, [1], dim=0).weight.shape == (1, 6)
    with pytest.raises(InputError, match="Can't prune layer of class dict"):
        prune_layer({}, [1])


def test_heads_are_counted_as_before_any_pruning():
    """Of six heads 0 and 3 are gone; 2 and 4 stand second and third now."""
    left, index = find_pruneable_heads_and_indices([2, 3, 4], 4, 2, {0, 3})
    assert left == {2, 4}
    np.testing.assert_array_equal(index, [0, 1, 6, 7])
    np.testing.assert_array_equal(find_pruneable_heads_and_indices([], 2, 2, ())[1], range(4))


def test_channels_of_a_head_stay_together():
    heads = Linear(weight=jnp.arange(24.0).reshape(3, 2, 4), bias=jnp.arange(6.0).reshape(3, 2))
    got = prune_linear_layer(heads, [4, 5, 0, 1])
    np.testing.assert_array_equal(got.weight, np.arange(24.0).reshape(3, 2, 4)[[2, 0]])
    np.testing.assert_array_equal(got.bias, [[4, 5], [0, 1]])
    for cut in ([0], [1, 2], [1, 0]):
        with pytest.raises(InputError, match="cuts through heads of 2"):
            prune_linear_layer(heads, cut)
    for outside in ([6, 7], [-2, -1]):
        with pytest.raises(InputError, match="channels: 6"):
            prune_linear_layer(heads, outside)


def part(kv_heads: int) -> Attention:
    """Attention of four heads with fresh weights and biases."""
    turn = rope({"rope_theta": 1e4}, head_dim=4, max_positions=16)
    made = attention(embed=8, heads=4, kv_heads=kv_heads, head_dim=4, bias=True, rope=turn)
    draw = np.random.default_rng(0).standard_normal
    weights = {p: jnp.asarray(draw(w.shape), jnp.float32) for p, w in paths(made, is_param).items()}
    return rebuild(made, weights)


@jax.jit
def output(attn: Attention) -> jax.Array:
    slots = jnp.arange(5)
    positions = jnp.broadcast_to(slots, (2, 5))
    ctx = Context(
        positions=positions,
        scene=Scene(q_slots=slots, k_slots=slots, aligned=True),
        rotary=(attn.rope.tables(positions),),
        ropes=(attn.rope,),
    )
    return attn(jnp.sin(jnp.arange(80.0)).reshape(2, 5, 8), ctx)[0]


@pytest.mark.parametrize(("kv_heads", "heads"), [(4, [0, 2]), (2, [2, 3])])
def test_pruned_attention_is_one_whose_heads_say_nothing(kv_heads, heads):
    attn = part(kv_heads)
    silent = attn.o_proj.weight.at[:, np.array(heads)].set(0)
    silent = dataclasses.replace(attn, o_proj=dataclasses.replace(attn.o_proj, weight=silent))
    pruned = prune_heads(attn, heads)
    assert pruned.q_proj.weight.shape == (2, 4, 8)
    np.testing.assert_allclose(output(pruned), output(silent), atol=1e-5)
    assert np.abs(output(silent) - output(attn)).max() > 1e-2


def test_no_heads_to_prune():
    attn = part(2)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, prune_heads(attn, []), attn))


def test_heads_that_share_keys_go_together():
    with pytest.raises(InputError, match=r"heads \[1\]: each 2 share .* Prune \[0, 1\]"):
        prune_heads(part(2), [1])


def test_layers_that_are_folded_into_one_are_refused():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), part(2))
    with pytest.raises(InputError, match="several layers"):
        prune_heads(stacked, [0, 1])


@pytest.mark.parametrize("heads", [[4], [-1], [0, 1, 2, 3]])
def test_heads_that_cannot_be_pruned(heads):
    with pytest.raises(InputError, match="not all"):
        prune_heads(part(2), heads)


def test_weights_that_are_not_there():
    with pytest.raises(InputError, match="weight is a Param"):
        prune_heads(attention(embed=8, heads=2, kv_heads=2, head_dim=4), [0])
