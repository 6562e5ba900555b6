"""What stands where, whatever it is stored as."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_caches as caches

from flaxen.cache import Pages
from flaxen.core.errors import CacheError

allocate = jax.jit(Pages.allocate)


@pytest.mark.parametrize(
    ("layout", "codec"),
    [("dense", codec) for codec in caches.CODECS]
    + [(layout, "int8") for layout in ("ring", "paged", "latent")],
)
def test_nine_tokens_at_once_and_one_by_one_are_the_same_bits(layout, codec):
    new = caches.tokens(layout, 9)
    whole = caches.appended(caches.cache(layout, codec), new, np.ones((2, 9), bool))
    steps = caches.cache(layout, codec)
    for t in range(9):
        one = [x[:, t : t + 1] for x in new]
        steps = caches.appended(steps, one, np.ones((2, 1), bool))
    assert caches.bits(whole) == caches.bits(steps)


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8"])
def test_what_is_stored_is_never_stored_again(codec):
    short = caches.appended(
        caches.cache("dense", codec), caches.tokens("dense", 5), np.ones((2, 5), bool)
    )
    more = caches.appended(short, caches.tokens("dense", 3, seed=1), np.ones((2, 3), bool))
    for before, after in zip(*map(jax.tree.leaves, (short.layers, more.layers)), strict=True):
        np.testing.assert_array_equal(before[:, :, :5], after[:, :, :5])


@pytest.mark.parametrize("layout", ["ring", "paged"])
def test_padding_takes_no_place(layout):
    new = caches.tokens(layout, 9)
    valid = np.ones((2, 9), bool)
    valid[0, [0, 1, 4, 8]] = False
    padded = caches.appended(caches.cache(layout), new, valid)
    alone = caches.cache(layout)
    for t in np.flatnonzero(valid[0]):
        alone = caches.appended(alone, [x[:, t : t + 1] for x in new], np.ones((2, 1), bool))
    assert padded.lengths.tolist() == [5, 9]
    for a, b in zip(*(caches.row(c, 0) for c in (padded, alone)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_ring_holds_the_last_tokens_and_knows_which():
    k, v = caches.tokens("ring", 11)
    cache = caches.appended(caches.cache("ring", length=6), (k, v), np.ones((2, 11), bool))
    slots, keys, values = caches.row(cache, 1)
    assert slots.tolist() == [8, 9, 10, 7]
    np.testing.assert_array_equal(keys, k[1, slots])
    np.testing.assert_array_equal(values, v[1, slots])


def test_a_ring_that_is_not_full_hides_the_rest():
    cache = caches.appended(caches.cache("ring"), caches.tokens("ring", 3), np.ones((2, 3), bool))
    assert cache.layers[0].positions(cache.lengths).tolist() == [[0, 1, 2, -1]] * 2


def test_pages_are_taken_as_rows_grow_and_given_back():
    pages = Pages(table=jnp.full((3, 3), -1), count=6, size=4)
    pages = allocate(pages, jnp.array([5, 0, 4]))
    assert pages.table.tolist() == [[0, 1, -1], [-1, -1, -1], [2, -1, -1]]
    again = allocate(pages, jnp.array([8, 1, 4]))
    assert again.table.tolist() == [[0, 1, -1], [3, -1, -1], [2, -1, -1]]
    freed = again.freed(jnp.array([True, False, False]))
    assert allocate(freed, jnp.array([1, 9, 4])).table.tolist() == [
        [0, -1, -1],
        [3, 1, 4],
        [2, -1, -1],
    ]


def test_a_row_for_which_no_page_is_left_is_told_so():
    pages = Pages(table=jnp.full((2, 3), -1), count=3, size=4)
    pages = allocate(pages, jnp.array([8, 8]))
    assert pages.table.tolist() == [[0, 1, -1], [2, -1, -1]]
    assert pages.enough(jnp.array([8, 8])).tolist() == [True, False]


def test_a_freed_row_begins_again_while_others_go_on():
    new = caches.tokens("paged", 5)
    cache = caches.appended(caches.cache("paged"), new, np.ones((2, 5), bool))
    before = caches.row(cache, 1)
    cache = cache.freed(jnp.array([True, False]))
    cache = caches.appended(cache, [x[:, :2] for x in new], np.array([[True, True], [False] * 2]))
    assert cache.lengths.tolist() == [2, 5]
    np.testing.assert_array_equal(caches.row(cache, 0)[1], new[0][0, :2])
    for a, b in zip(before, caches.row(cache, 1), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CacheError, match="paged"):
        caches.cache("dense").freed(jnp.array([True, False]))


@pytest.mark.parametrize("layout", caches.LAYOUTS)
def test_a_grown_cache_goes_on_as_one_made_larger_at_once(layout):
    new, more = caches.tokens(layout, 8), caches.tokens(layout, 6, seed=1)
    eight, six = np.ones((2, 8), bool), np.ones((2, 6), bool)
    grown = caches.appended(caches.cache(layout, "int8", 8), new, eight).grown(16)
    large = caches.appended(caches.cache(layout, "int8", 16), new, eight)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, large)
    assert caches.bits(caches.appended(grown, more, six)) == caches.bits(
        caches.appended(large, more, six)
    )


@pytest.mark.parametrize("layout", ["dense", "paged", "latent"])
def test_a_cropped_cache_goes_on_as_if_the_rest_had_never_been(layout):
    new, more = caches.tokens(layout, 8), caches.tokens(layout, 4, seed=1)
    four = np.ones((2, 4), bool)
    first = caches.appended(caches.cache(layout), [x[:, :4] for x in new], four)
    cropped = caches.appended(first, [x[:, 4:] for x in new], four).cropped(4)
    assert cropped.lengths.tolist() == [4, 4]
    assert int(cropped.index) == 4
    assert caches.bits(caches.appended(cropped, more, four)) == caches.bits(
        caches.appended(first, more, four)
    )


@pytest.mark.parametrize("slots", [-1, 5])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_only_slots_in_use_can_be_kept(layout, slots):
    used = caches.appended(caches.cache(layout), caches.tokens(layout, 4), np.ones((2, 4), bool))
    with pytest.raises(CacheError, match=f"{slots} slots cannot be kept of 4"):
        used.cropped(slots)


def test_a_ring_cannot_go_back():
    with pytest.raises(CacheError, match="cannot go back"):
        caches.cache("ring").cropped(2)


@pytest.mark.parametrize("layout", ["dense", "latent", "paged", "ring"])
def test_tokens_past_the_end_have_no_room(layout):
    """But in a ring."""
    cache = caches.appended(
        caches.cache(layout, length=8), caches.tokens(layout, 7), np.ones((2, 7), bool)
    )
    room = [caches.advance(cache, jnp.ones((2, n), bool)) for n in (1, 2)]
    if layout == "ring":
        assert room == [None, None]
    else:
        assert [bool(jnp.all(x)) for x in room] == [True, False]


def test_memory_falls_with_the_codec_and_with_a_window():
    def size(layout, codec):
        return sum(x.nbytes for x in jax.tree.leaves(caches.cache(layout, codec, 64).layers))

    plain = 2 * 2 * 64 * (8 + 6) * 4
    assert size("dense", None) == plain
    assert size("dense", "int8") == plain // 4 + 2 * 2 * 64 * 2 * 4
    assert size("dense", "int4") == plain // 8 + 2 * 2 * 64 * 2 * 4
    assert size("ring", None) == plain * caches.WINDOW // 64
    assert size("paged", None) == plain
    assert size("latent", None) == plain // 2
