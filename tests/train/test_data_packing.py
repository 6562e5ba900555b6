"""A document in a row with others is learned as if it were alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny_decoder import tiny

from flaxen.models.causal import whole_context
from flaxen.train.data.batches import make_batches
from flaxen.train.data.examples import Example
from flaxen.train.data.packing import packed

SEQ_LEN = 12


def documents(vocab: int = 90) -> list[Example]:
    """The first token of each says which it is."""
    draw = np.random.default_rng(1)
    lengths = [2, 5, 3, 7, 12, 4, 2, 6]
    made = []
    for i, length in enumerate(lengths):
        ids = np.append(i + 1, draw.integers(10, vocab, length - 1)).astype(np.int32)
        made.append(Example(ids, ids))
    return made


@jax.jit
def logps(model, batch):
    """log p of each target."""
    ids, positions, segments = (batch.get(key) for key in ("ids", "positions", "segments"))
    ctx = whole_context(
        model.module, ids.shape, model.runtime, position_ids=positions, segment_ids=segments
    )
    return model.module.logps(ids, batch["targets"], ctx)[0]


def losses(model, batches) -> dict[int, float]:
    """-log p of each document, by its first token, over an epoch."""
    found = {}
    for step in range(batches.per_epoch):
        batch = {key: x[0] for key, x in batches.batch_at(step).items()}
        ids, segments = batch["ids"], batch.get("segments")
        found_here = np.asarray(logps(model, batch), np.float64)
        for row in range(len(ids)):
            numbers = [1] if segments is None else np.unique(segments[row]).tolist()
            for number in (n for n in numbers if n):
                here = np.ones(SEQ_LEN, bool) if segments is None else segments[row] == number
                if (batch["targets"][row][here] != -100).any():
                    found[int(ids[row][here][0])] = -found_here[row][here].sum()
    return found


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_next", "llama4_text"])
def test_losses_of_documents_are_those_of_documents_alone(name):
    """Positions that are learned, windows, states that are carried from token to token, and queries
    that grow with their place.
    """
    model, settings = tiny(name), {"seq_len": SEQ_LEN, "batch_size": 2}
    together = make_batches(documents(), **settings)
    alone = make_batches(documents(), packing=False, **settings)
    assert together.packed and together.per_epoch < alone.per_epoch
    found, expected = losses(model, together), losses(model, alone)
    assert sorted(found) == sorted(expected) == list(range(1, 9))
    for document, loss in expected.items():
        assert found[document] == pytest.approx(loss, rel=1e-6, abs=1e-6)


def test_rows_are_given_out_when_they_are_full():
    """So that a stream needs to keep 64 of them only."""
    taken = []

    def items():
        for i, length in enumerate([3, 4, 1, 2, 3]):
            taken.append(i)
            yield i, length

    rows = packed(items(), 5)
    assert next(rows) == [1]
    assert taken == [0, 1]
    assert list(rows) == [[0, 2], [3, 4]]


def test_too_many_open_rows_let_the_oldest_go():
    rows = list(packed(((i, 6) for i in range(70)), 10))
    assert rows == [[i] for i in range(70)]
