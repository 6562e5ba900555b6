"""Transforms: rules that rename and convert the keys of a checkpoint, both ways."""
