"""Tiny checkpoints for every entry with a converter: loaded and saved in both systems."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import counterpart
import numpy as np
import sampling
import torch
from transformers import core_model_loading as theirs_loading
from transformers.modeling_utils import LoadStateDictConfig

from flaxen.convert.lazy import Box, LazyTensor
from flaxen.convert.transforms import revert, reverted, transformed

EXPERTS = 12
LAYERS = ("0", "10")
HEADS = 2

CONFIG = SimpleNamespace(
    num_attention_heads=HEADS, split_ngram_parts=3, vocab_size=10, unpadded_vocab_size=7
)
CONFIG.vision_config = CONFIG
CONFIG.get_text_config = lambda *_, **__: CONFIG

TURNED = (
    "gives back the checkpoint's layout; theirs takes the transposed tensor for one that was never "
    "turned, as it has the model's shape"
)


class InMemory(LazyTensor):
    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        out[...] = self.array[(*box, ...)]


class Skeleton(torch.nn.Module):
    """A model that is nothing but named parameters."""

    base_model_prefix = ""
    config = CONFIG

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        for name, shape in shapes.items():
            *outer, last = name.split(".")
            module = self
            for part in outer:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(
                last, torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            )

    def get_parameter_or_buffer(self, name: str) -> torch.Tensor:
        return self.get_parameter(name)


def compare(entry: str, transforms: list[Any], result: Any) -> None:
    """The entry's checkpoint through their loader and saver, and through ours."""
    if not _operations(transforms):
        return
    result.with_converter += 1
    checkpoint, wanted = _checkpoint(entry, transforms, result)
    if not checkpoint:
        result.fail(f"{entry}: no key leads to a converter")
        return
    model = Skeleton(wanted)
    their_transforms = [copy.deepcopy(t) for t in transforms]
    settings = LoadStateDictConfig(weight_mapping=their_transforms, dtype=torch.float32)
    tensors = {name: torch.from_numpy(array) for name, array in checkpoint.items()}
    info, _ = theirs_loading.convert_and_load_state_dict_in_model(model, tensors, settings, None)
    ours = [counterpart.ours(t) for t in transforms]
    lazy = {name: InMemory(array) for name, array in checkpoint.items()}
    view = transformed(lazy, ours, wanted, config=CONFIG, base_prefix="")
    _loaded(entry, model, info, view, wanted, result)
    _saved(entry, model, view, checkpoint, ours, transforms, result)


def _loaded(entry: str, model: Any, info: Any, view: Any, wanted: Any, result: Any) -> None:
    result.checkpoints += 1
    state = model.state_dict()
    absent = {name for name in wanted if name not in view}
    if info.conversion_errors or view.errors:
        result.fail(f"{entry}: theirs {info.conversion_errors}, ours {view.errors}")
    if absent != set(info.missing_keys) or view.unexpected or info.unexpected_keys:
        result.fail(
            f"{entry}: missing {info.missing_keys} and {absent}, unexpected "
            f"{info.unexpected_keys} and {view.unexpected}"
        )
    for name in view:
        result.tensors += 1
        if not _same(state[name], view[name]):
            result.fail(f"{entry}: {name} differs from theirs")


def _saved(
    entry: str, model: Any, view: Any, checkpoint: Any, ours: Any, transforms: Any, result: Any
) -> None:
    state = model.state_dict()
    back = reverted(view, view.applied)
    exact = back.keys() == checkpoint.keys() and all(
        np.array_equal(back[name].read(), checkpoint[name]) for name in back
    )
    result.saved += exact
    if not exact:
        result.fail(f"{entry}: {sorted(back.keys() ^ checkpoint.keys())[:6]} differ when saved")
    theirs = theirs_loading.revert_weight_conversion(model, state)
    same = theirs.keys() == checkpoint.keys() and all(
        np.array_equal(theirs[n].numpy(), checkpoint[n]) for n in theirs
    )
    result.theirs_saved += same
    if not same:
        reason = TURNED if exact and _turns(transforms) else None
        result.decide(reason, f"{entry}: theirs does not save what it loaded")
    _new(entry, model, view, ours, transforms, result)


def _new(entry: str, model: Any, view: Any, ours: Any, transforms: Any, result: Any) -> None:
    """The same weights as those of a model that was never loaded."""
    model._weight_conversions = [
        copy.deepcopy(t) for t in transforms if not isinstance(t, theirs_loading.PrefixChange)
    ]
    theirs = theirs_loading.revert_weight_conversion(model, model.state_dict())
    made = revert(view, ours, CONFIG)
    result.new += 1
    odd = sorted(made.keys() ^ theirs.keys())
    if odd or not all(_same(theirs[n], made[n]) for n in made):
        reason = TURNED if not odd and _turns(transforms) else None
        result.decide(reason, f"{entry}: a new model's tensors differ {odd[:6]}")


def _turns(transforms: list[Any]) -> bool:
    return any(getattr(op, "check_dims", False) for op in _operations(transforms))


def _operations(transforms: list[Any]) -> list[Any]:
    return [op for t in transforms for op in getattr(t, "operations", ())]


def _same(theirs: torch.Tensor, ours: LazyTensor) -> bool:
    array = theirs.numpy()
    return array.shape == ours.shape and np.array_equal(array, ours.read())


def _checkpoint(entry: str, transforms: list[Any], result: Any):
    """Tensors by key that the entry's transforms take, and the shapes that the model wants."""
    renamings = [t for t in transforms if not hasattr(t, "operations")]
    converters = [t for t in transforms if hasattr(t, "operations")]
    checkpoint: dict[str, np.ndarray] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    for converter in converters:
        if counterpart.uncovered(converter):
            result.not_covered.append(f"{entry}: {converter.operations}")
            continue
        shape, count, targets = _shapes(converter)
        reached = False
        for layer in LAYERS:
            keys = [
                _keys(p, layer, count, converter, renamings, converters)
                for p in converter.source_patterns
            ]
            if not all(keys):
                continue
            reached = True
            for key in (key for some in keys for key in some):
                checkpoint.setdefault(key, _values(key, shape))
            wanted |= _targets(converter, keys, shape, targets, renamings, converters)
        if reached:
            result.converters += 1
        else:
            result.fail(f"{entry}: no key reaches {converter}")
    return checkpoint, wanted


def _keys(
    pattern: str, layer: str, count: int, converter: Any, renamings: Any, converters: Any
) -> list[str]:
    """Keys that become this source: as the pattern says, or as the renamings reversed say."""
    numbers = range(count) if count and "*." in pattern else range(1)
    found = []
    for number in numbers:
        text = sampling.texts(pattern, str(number) if count else layer)[0]
        where = "" if pattern.startswith("^") else f"model.layers.{layer}."
        name = where + text.lstrip(".") if where.endswith(".") else text
        if text.endswith("."):
            name += "weight"
        elif re.search(r"\w$", text) and not re.search(r"(weight|bias|proj\w*|experts?)$", text):
            name += ".weight"
        key = _key_for(name, pattern, renamings, converters)
        if key is None:
            return []
        found.append(key)
    return found


def _key_for(name: str, pattern: str, renamings: Any, converters: Any) -> str | None:
    before = name
    for renaming in reversed(renamings):
        before = copy.deepcopy(renaming).reverse_transform().rename_source_key(before)[0]
    for key in (name, before):
        _, found = _named(key, renamings, converters)
        if found == pattern:
            return key
    return None


def _named(key: str, renamings: Any, converters: Any) -> tuple[str, str | None]:
    fresh = [copy.deepcopy(t) for t in renamings], [copy.deepcopy(t) for t in converters]
    return theirs_loading.rename_source_key(key, *fresh)


def _targets(converter, keys, shape, targets, renamings, converters):
    """Names and shapes of what the converter makes of these keys, by a run of its operations."""
    name, _ = _named(keys[0][0], renamings, converters)
    first = converter.target_patterns[0]
    if targets is not None:
        return {
            name.replace(first, t): s
            for t, s in zip(converter.target_patterns, targets, strict=True)
        }
    stub = SimpleNamespace(
        get_parameter=lambda _: torch.zeros(1),
        get_parameter_or_buffer=lambda _: torch.zeros(1, 1, 1),
        config=CONFIG,
    )
    data = {
        p: [torch.from_numpy(_values(k, shape)) for k in some]
        for p, some in zip(converter.source_patterns, keys, strict=True)
    }
    for op in converter.operations:
        data = op.convert(
            data,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=name,
            model=stub,
            config=CONFIG,
            missing_keys=None,
        )
    made = {k: v[0] if isinstance(v, list) else v for k, v in data.items()}
    return {name.replace(first, k): tuple(v.shape) for k, v in made.items()}


def _shapes(converter: Any):
    """Shape of each source tensor, how many a glob stands for, and target shapes if fixed."""
    kinds = [type(op).__name__ for op in converter.operations]
    n = len(converter.target_patterns)
    dim = getattr(converter.operations[0], "dim", 0)
    if kinds[0] == "MergeModulelist":
        return (4, 6), EXPERTS, None
    if kinds[0] == "Split":
        sizes = [8, *[4] * (n - 1)]
        return (sum(sizes), 6), 0, [(size, 6) for size in sizes]
    if kinds[0].startswith("Ernie"):
        return (4, 6), EXPERTS, None
    if kinds[0] == "Concatenate" and converter.operations[0].num_shards_attribute:
        return (4, 6), CONFIG.split_ngram_parts, None
    if kinds[0] == "Inkling2UnpadVocab":
        return (CONFIG.vocab_size, 6), 0, None
    three = kinds[0] == "Transpose" and 2 in (converter.operations[0].dim1,)
    if three or (kinds[0] == "Interleave" and dim == 1):
        return (3, 8, 4), 0, None
    return (24, 6), 0, None


def _values(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of its own for each key: tensors that change places must not stay equal."""
    values = np.random.default_rng(list(key.encode())).standard_normal(shape, np.float32)
    if shape[0] == CONFIG.vocab_size:
        values[CONFIG.unpadded_vocab_size :] = 0
    return values
