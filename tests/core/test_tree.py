"""Modules as pytrees."""

from __future__ import annotations

import jax

from flaxen.layers.norm import Identity


def test_classes_without_fields_are_told_apart_by_name():
    """jax compares their structures by what this gives; by the class alone it has been seen to take
    one's program for another's.
    """
    node = jax.tree.structure(Identity()).node_data()
    assert node is not None and node[1] == "flaxen.layers.norm.Identity"
    assert jax.tree.leaves(Identity()) == []
    assert jax.tree.unflatten(jax.tree.structure(Identity()), []) == Identity()
