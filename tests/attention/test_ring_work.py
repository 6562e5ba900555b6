"""What a ring computes, moves and remembers; and whole models on it."""

from __future__ import annotations

import collections
import dataclasses

import golden
import jax
import numpy as np
import pytest
import tiny
from rings import arrays, call, scene

from flaxen.attention import MECHANISMS, AttentionSettings, Blocks, Mask, online
from flaxen.attention.ring_layout import plan, work
from flaxen.generate import generate
from flaxen.models import causal


def shares(c):
    return [len(pairs) for pairs in work(c, plan(c))]


def test_balance_gives_every_device_the_same_work():
    how = {"blocks": Blocks(q=4, k=4)}
    assert shares(call(64, "sp=4", **how)) == [10, 26, 42, 58]
    assert shares(call(64, "sp=4", balanced=True, **how)) == [34, 34, 34, 34]


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("T", "mask"), [(64, Mask()), (61, Mask(window=10)), (64, Mask(chunk=16))])
def test_every_pair_that_sees_something_is_computed_once(T, mask, balanced):
    c = call(T, "sp=4", mask=mask, balanced=balanced, blocks=Blocks(q=4, k=4))
    done = collections.Counter(pair for pairs in work(c, plan(c)) for pair in pairs)
    i, j = np.arange(T)[:, None], np.arange(T)
    see = (
        (j <= i) & (i - j < (mask.window or T)) & (i // (mask.chunk or T) == j // (mask.chunk or T))
    )
    assert done == dict.fromkeys(zip(*(np.argwhere(see) // 4).T.tolist(), strict=True), 1)


def test_hidden_tiles_are_really_skipped(monkeypatch):
    c = call(40, "sp=4", balanced=True, mask=Mask(window=12), blocks=Blocks(q=3, k=3))
    steps, step = [], online.step

    def counted(*args, **how):
        jax.debug.callback(lambda: steps.append(1))
        return step(*args, **how)

    monkeypatch.setattr(online, "step", counted)
    attend = MECHANISMS["ring"].attend
    jax.block_until_ready(jax.jit(lambda *a: attend(*a, c, scene(c)))(*arrays(c)[:3]))
    jax.effects_barrier()
    assert len(steps) == sum(shares(c))


@pytest.mark.parametrize(
    ("hops", "mask"),
    [(7, Mask()), (0, Mask(window=1)), (1, Mask(window=2)), (1, Mask(window=9)),
     (2, Mask(window=10)), (3, Mask(window=100, chunk=18)), (7, Mask(window=100)),
     (7, Mask(causal=False, window=2)), (7, Mask(window=2, prefix=True))],
)  # fmt: skip
def test_a_local_ring_asks_as_many_neighbours_as_the_window_reaches(hops, mask):
    assert plan(call(64, "sp=8", mask=mask), near=True).hops == hops


def test_the_program_does_not_grow_with_the_ring():
    def equations(mesh):
        c = call(64, mesh)
        loss = lambda *args: MECHANISMS["ring"].attend(*args, c, scene(c)).sum()
        return len(str(jax.make_jaxpr(jax.grad(loss))(*arrays(c)[:3])).split(" = "))

    assert equations("sp=8") == equations("sp=4")


def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporary(T):
        c = call(T, "sp=4", blocks=Blocks(q=32, k=32))
        loss = lambda *args: MECHANISMS["ring"].attend(*args, c, scene(c)).sum()
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays(c)[:3])
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 4.4 * temporary(512)


def on(mesh, **settings):
    model = tiny.model("llama", mesh)
    runtime = dataclasses.replace(
        model.runtime, attention=AttentionSettings(**{"mechanism": "ring"} | settings)
    )
    return dataclasses.replace(model, runtime=runtime)


def loss_and_gradients(model):
    x = golden.case("llama").arrays
    names = "input_ids", "attention_mask", "position_ids"

    @jax.jit
    def run(module):
        def loss(module):
            out = causal.forward(
                module, *(x[n] for n in names), labels=x["labels"], runtime=model.runtime
            )
            return out.loss, out.logits

        return jax.value_and_grad(loss, has_aux=True)(module)

    (loss, logits), grads = jax.block_until_ready(run(model.module))
    return loss, logits, jax.tree.leaves(grads)


def test_a_whole_model_on_a_ring_equals_transformers_and_one_device():
    x = golden.case("llama").arrays
    loss, logits, grads = loss_and_gradients(on("sp=2,tp=2,fsdp=2", balanced=True))
    real = x["attention_mask"].astype(bool)
    np.testing.assert_allclose(np.asarray(logits)[real], x["logits"][real], atol=2e-5)
    np.testing.assert_allclose(loss, x["loss"], atol=1e-5)
    _, _, alone = loss_and_gradients(on(None, mechanism="vanilla"))
    for got, want in zip(grads, alone, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5 * max(1, float(abs(want).max())))


@pytest.mark.exhaustive
def test_generation_on_a_ring_gives_the_tokens_of_one_device():
    x = golden.case("llama").arrays
    prompt = x["gen_input_ids"], x["gen_attention_mask"]
    got = generate(on("sp=4"), *prompt, max_new_tokens=16)
    np.testing.assert_array_equal(got, x["gen_sequences"])
