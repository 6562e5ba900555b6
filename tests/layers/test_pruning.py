"""What stays computes what it did."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden import DATA, case

from flaxen.core.errors import InputError
from flaxen.layers.attention import attention
from flaxen.layers.conv1d import Conv1D
from flaxen.layers.linear import Linear
from flaxen.layers.pruning import (
    find_pruneable_heads_and_indices,
    prune_conv1d_layer,
    prune_heads,
    prune_layer,
    prune_linear_layer,
)
from flaxen.models.causal import forward

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


def zeroed(attn, heads):
    """The same attention with nothing coming out of some heads."""
    weight = attn.o_proj.weight.at[:, list(heads)].set(0)
    return dataclasses.replace(attn, o_proj=dataclasses.replace(attn.o_proj, weight=weight))


def with_first(module, attn):
    first = dataclasses.replace(module.layers[0], self_attn=attn)
    return dataclasses.replace(module, layers=[first, *module.layers[1:]])


@pytest.mark.parametrize(("name", "heads"), [("llama", [2, 3]), ("gpt2", [0, 2])])
def test_a_pruned_model_is_one_whose_heads_say_nothing(name, heads):
    model, ids = tiny.model(name), case(name).arrays["input_ids"]
    attn = model.module.layers[0].self_attn
    run = lambda attn: forward(with_first(model.module, attn), ids, runtime=model.runtime).logits
    got = run(prune_heads(attn, heads))
    np.testing.assert_allclose(got, run(zeroed(attn, heads)), atol=2e-5)
    assert np.abs(got - run(attn)).max() > 1e-3


def test_heads_that_share_keys_go_together():
    attn = tiny.model("llama").module.layers[0].self_attn
    with pytest.raises(InputError, match=r"heads \[1\]: each 2 share .* Prune \[0, 1\]"):
        prune_heads(attn, [1])


@pytest.mark.parametrize("heads", [[4], [-1], [0, 1, 2, 3]])
def test_heads_that_cannot_be_pruned(heads):
    with pytest.raises(InputError, match="not all"):
        prune_heads(tiny.model("llama").module.layers[0].self_attn, heads)


def test_weights_that_are_not_there():
    with pytest.raises(InputError, match="weight is a Param"):
        prune_heads(attention(embed=8, heads=2, kv_heads=2, head_dim=4), [0])
