"""Adapters of a model as a folder in the format of the PEFT library."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.writing import write_file
from flaxen.convert.relation import Relation, renamer
from flaxen.convert.swap import writing
from flaxen.core.errors import ConfigError
from flaxen.core.tree import paths
from flaxen.core.whole_file import whole_file
from flaxen.layers.linear import Linear
from flaxen.models.fold import in_body, plain_paths
from flaxen.shard.host import on_host
from flaxen.tune.config import CONFIG, PREFIX, WEIGHTS
from flaxen.tune.leaf import DoRA, LowRank, Replaced, links, root, row_norms
from flaxen.tune.modules import Module, Names, check_apart, modules, whole_rows
from flaxen.tune.several import adapter_names, adapters, checked


@dataclasses.dataclass(frozen=True)
class Piece:
    """The adapter of one projection of one layer: a (rank, in...), b (out..., rank)."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None
    dropout: float


def save_adapter(
    tree: Any,
    folder: str | os.PathLike[str],
    names: Names,
    *,
    name: str | None = None,
    alpha: float | None = None,
    rank_stabilised: bool = False,
    fan_in_fan_out: bool = False,
    base: str | None = None,
    task_type: str = "CAUSAL_LM",
) -> Path:
    """Write one adapter of a model, `name` if it has several; `names` as in `load_adapter`, `base`
    the name of the model they belong to. `fan_in_fan_out` tells PEFT that the projections lie
    `[in, out]` in the base's file; adapters look the same either way.

    A head that a task began with is written whole. Projections that are one module of the
    checkpoint become one adapter of it: with their common A,
    or of a rank that is the sum of theirs. `alpha` is checked against the adapters' scale.

    Raises:
        ConfigError: when the model has none, or `alpha` is not theirs, or one is on a part of a
            tensor of the file and `names` is no relation.
    """
    if not adapters(tree):
        raise ConfigError("This model has no adapters to save; were they merged?")
    name = _only(tree) if name is None else checked(tree, name)[0]
    mine = {p: x for p, x in adapters(tree).items() if any(k.name == name for k in links(x))}
    check_apart(mine, names)
    every = modules(tree, names)
    tensors, shapes, dropout = _tensors(tree, name, every)
    heads = _heads(tree, names)
    whole = _whole(tree, name, names) | heads
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if heads else task_type,
        "base_model_name_or_path": base,
        **_ranks(shapes, rank_stabilised, alpha),
        "use_dora": any(key.endswith("lora_magnitude_vector") for key in tensors),
        "target_modules": _short(shapes, [m.name for m in every]),
        "modules_to_save": sorted({key.rpartition(".")[0] for key in whole}) or None,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
    }
    return _written(Path(folder), tensors | whole, config)


def _only(tree: Any) -> str:
    names = adapter_names(tree)
    if len(names) > 1:
        raise ConfigError(
            f"This model has the adapters {', '.join(map(repr, names))}; say which one by name=."
        )
    return names[0]


def _tensors(
    tree: Any, name: str, every: Sequence[Module]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, float]], float]:
    """Arrays by their names in the file, rank and scale by module, and the rate of dropout."""
    pieces, bases = _pieces(tree, name)
    tensors: dict[str, np.ndarray] = {}
    shapes: dict[str, tuple[int, float]] = {}
    for module in every:
        mine = {x: pieces[module.path(x)] for x in module.labels if module.path(x) in pieces}
        if not mine:
            continue
        a, b, scale = joined(module, mine)
        tensors[f"{module.name}.lora_A.weight"] = a
        tensors[f"{module.name}.lora_B.weight"] = b
        if any(piece.magnitude is not None for piece in mine.values()):
            lengths = {x: _lengths(module.path(x), mine.get(x), bases) for x in module.labels}
            tensors[f"{module.name}.lora_magnitude_vector"] = module.join_magnitude(lengths)
        shapes[module.name] = len(a), scale
    return tensors, shapes, max((piece.dropout for piece in pieces.values()), default=0.0)


def _pieces(tree: Any, name: str) -> tuple[dict[str, Piece], Any]:
    """What each projection has, by its path in the model that is not folded, and how to find the
    weights themselves. Layers and ranks that are only zeros are left out.
    """
    folded, plain, pieces, bases = in_body(tree), plain_paths(tree), {}, {}
    for path, layer in paths(tree, is_leaf=lambda x: isinstance(x, Linear)).items():
        if not isinstance(layer, Linear):
            continue
        own = [k for k in links(layer.weight) if k.name == name and isinstance(k, LowRank)]
        arrays = [_arrays(link) for link in own]
        for i, each in enumerate(plain(path)):
            bases[each] = layer, i, folded(path)
            if own:
                pick = lambda x, i=i, path=path: x[i] if folded(path) else x
                piece = _piece(own, [jax.tree.map(pick, x) for x in arrays])
                pieces |= {each: piece} if len(piece.a) else {}
    return pieces, bases


def _arrays(link: LowRank) -> dict[str, np.ndarray]:
    fields = ("a", "b", "magnitude") if isinstance(link, DoRA) else ("a", "b")
    return {field: on_host(getattr(link, field)).astype(np.float32) for field in fields}


def _piece(own: Sequence[LowRank], arrays: Sequence[dict[str, np.ndarray]]) -> Piece:
    last = own[-1]
    factors = [np.float32(x.scale / last.scale if last.scale else 1) for x in own]
    a = np.concatenate([x["a"] for x in arrays])
    b = np.concatenate([x["b"] * f for x, f in zip(arrays, factors, strict=True)], -1)
    used = a.reshape(len(a), -1).any(1) | b.reshape(-1, len(a)).any(0)
    return Piece(a[used], b[..., used], last.scale, arrays[-1].get("magnitude"), last.dropout)


def joined(module: Module, parts: Mapping[str, Piece]) -> tuple[np.ndarray, np.ndarray, float]:
    """A (rank, in), B (out, rank) and the scale of a module, of those of our projections in it:
    their common A, or A above A and the blocks of B apart.
    """
    first, *others = parts.values()
    shared = all(np.array_equal(first.a, x.a) for x in others)
    ranks = [len(first.a)] if shared else [len(x.a) for x in parts.values()]
    starts = [0] * len(parts) if shared else list(np.cumsum([0, *ranks[:-1]]))
    scale = max((x.scale for x in parts.values()), key=abs)
    above = list(parts)[:1] if shared else list(parts)
    a = np.concatenate([module.join_a(label, parts[label].a) for label in above])
    b = {x: np.zeros((*module.outs(x), sum(ranks)), np.float32) for x in module.labels}
    for (label, piece), start in zip(parts.items(), starts, strict=True):
        factor = np.float32(piece.scale / scale if scale else 1)
        b[label][..., start : start + len(piece.a)] = piece.b * factor
    return a, module.join_b(b), scale


def _lengths(path: str, piece: Piece | None, bases: Mapping[str, Any]) -> np.ndarray:
    """Lengths of rows: the adapter's, or those of a projection without one as they are."""
    if piece is not None and piece.magnitude is not None:
        return piece.magnitude
    if piece is not None:
        raise ConfigError(f"{path} is adapted without lengths, another part of its tensor with.")
    layer, i, folded = bases[path]
    weight = root(layer.weight)
    weight = jax.tree.map(lambda x: x[i], weight) if folded else weight
    return np.asarray(row_norms(weight, layer.contract))


def _ranks(
    shapes: Mapping[str, tuple[int, float]], rank_stabilised: bool, alpha: float | None
) -> dict[str, Any]:
    """r and lora_alpha of most modules, and patterns for the others."""
    alphas = {
        name: (rank, _tidy(scale * (math.sqrt(rank) if rank_stabilised else rank)))
        for name, (rank, scale) in shapes.items()
    }
    usual = Counter(alphas.values()).most_common(1)
    r, most = usual[0][0] if usual else (8, 8)
    if alpha is not None and not any(math.isclose(alpha, a) for _, a in alphas.values()):
        raise ConfigError(f"alpha is {alpha}, but the adapters' scale says {most}; leave it out.")
    return {
        "r": r,
        "lora_alpha": most,
        "use_rslora": rank_stabilised,
        "rank_pattern": {name: n for name, (n, _) in alphas.items() if n != r},
        "alpha_pattern": {name: a for name, (_, a) in alphas.items() if a != most},
    }


def _tidy(alpha: float) -> float:
    near = round(alpha)
    return near if math.isclose(alpha, near, rel_tol=1e-12, abs_tol=1e-12) else alpha


def _short(adapted: Iterable[str], every: Sequence[str]) -> list[str]:
    """The last words of the adapted modules' names: as many as tell them from all others."""
    adapted = set(adapted)
    others = [name.split(".") for name in every if name not in adapted]
    taken = {".".join(words[-n:]) for words in others for n in range(1, len(words) + 1)}

    def short(name: str) -> str:
        words = name.split(".")
        ends = (".".join(words[-n:]) for n in range(1, len(words)))
        return next((end for end in ends if end not in taken), name)

    return sorted({short(name) for name in adapted})


def _whole(tree: Any, name: str, names: Names) -> dict[str, np.ndarray]:
    """Weights that are trained in full, under their names in the checkpoint."""
    out = {}
    found = {
        path: link.value
        for path, leaf in adapters(tree).items()
        for link in links(leaf)
        if isinstance(link, Replaced) and link.name == name
    }
    for key, row in whole_rows(tree, names).items():
        path = next(iter(row.parts.values()))[0]
        if path in found:
            out[key] = row.save({path: ArrayTensor(found[path])})[key].read()
    return out


def _heads(tree: Any, names: Names) -> dict[str, np.ndarray]:
    """The head that a task began with, which is trained in full, under its names."""
    starts = tuple(f"{head}." for head in tree.heads())
    mine = {path: x for path, x in paths(tree).items() if path.startswith(starts)}
    if not isinstance(names, Relation):
        return {renamer(names)(path): on_host(x) for path, x in mine.items()}
    out: dict[str, np.ndarray] = {}
    for row in names.rows:
        parts = {path: ArrayTensor(mine[path]) for path, _ in row.parts.values() if path in mine}
        out |= {key: x.read() for key, x in row.save(parts).items()} if parts else {}
    return out


def _written(folder: Path, tensors: Mapping[str, np.ndarray], config: dict[str, Any]) -> Path:
    """Each file is the old one or the new one at every moment. Of several processes the first
    writes.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    if jax.process_index() > 0:
        return folder
    arrays = {f"{PREFIX}{key}": ArrayTensor(np.ascontiguousarray(x)) for key, x in tensors.items()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / WEIGHTS) as aside:
            write_file(aside, arrays, {"format": "pt"})
        with whole_file(folder / CONFIG) as aside:
            aside.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
