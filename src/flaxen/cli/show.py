"""`flaxen show`: a model's parts, before anything is loaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.options import Count, Download, Json, Loading, Source, about
from flaxen.cli.output import print_json, print_out, remark
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.shard import Placement


def show(
    model: Source,
    *,
    length: Annotated[Count, about("Tokens that attention is chosen for.")] = 1024,
    html: Annotated[str | None, about("Write a page that shows where each weight lives.")] = None,
    download: Download = False,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Print the parts of a model, their sizes and where they would lie.

    Only headers are read. With --mesh it draws which device would hold which piece, which needs no
    such devices.
    """
    from flaxen.attention import AttentionSettings
    from flaxen.layers.runtime import Runtime
    from flaxen.show import attention_choices, parts, totals

    if length < 1:
        raise InputError(f"--length is {length}; expected at least 1.")
    loaded = loading.look(model, download)
    abstract = loaded.module
    placement = planned(loading.mesh, loading.plan)
    tree = parts(abstract, placement)
    uncut = placement.all_uncut(abstract) if placement else []
    runtime = Runtime(placement=placement, attention=AttentionSettings(loading.attention))
    kinds = {
        kind: attention_choices(
            abstract,
            queries=queries,
            keys=length,
            dtype=loading.dtype or _dtype(abstract),
            runtime=runtime,
        )
        for kind, queries in (("prefill", length), ("decode", 1))
        if kind == "prefill" or getattr(abstract, "generates", True)
    }
    if html is not None:
        _write_page(html, model, tree, placement, uncut)
    if json:
        whole = {"replicated": uncut} if placement else {}
        print_json({**totals(tree), **whole, "attention": kinds, "parts": tree.as_dict()})
    else:
        _print(tree, kinds, placement, uncut)


def planned(mesh: str | None, plan: str | None) -> Placement | None:
    """A plan on a mesh that only exists on paper."""
    from flaxen.shard import plan_named

    wanted = plan_named(plan)
    if mesh is None:
        return None
    import jax

    from flaxen.shard import Placement, parse_mesh
    from flaxen.shard.mesh import resolve_sizes

    sizes = parse_mesh(mesh)
    if -1 in sizes.values():
        sizes = resolve_sizes(sizes, jax.device_count())
    # Sizes and names are all that a placement looks at until arrays are placed.
    paper: Any = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return Placement(paper, wanted)


def _write_page(
    path: str, model: str, tree: Any, placement: Placement | None, uncut: list[str]
) -> None:
    from flaxen.core.whole_file import whole_file
    from flaxen.show import placement_page

    if placement is None:
        raise InputError("--html shows a mesh; say which one, for example --mesh fsdp=2,tp=4.")
    try:
        with whole_file(path) as aside:
            page = placement_page(model, tree, dict(placement.mesh.shape), uncut)
            aside.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None
    remark(f"Wrote {path}.")


def _dtype(abstract: Any) -> str:
    from collections import Counter

    from flaxen.core.tree import is_param, paths

    sizes: Counter[str] = Counter()
    for leaf in paths(abstract, is_leaf=is_param).values():
        sizes[str(leaf.dtype or "float32")] += leaf.size
    return sizes.most_common(1)[0][0]


def _print(tree: Any, kinds: dict[str, Any], placement: Placement | None, uncut: list[str]) -> None:
    from flaxen.show import (
        device_names,
        human_bytes,
        human_number,
        parts_tree,
        pictures,
        share_lines,
        table,
    )

    print_out(parts_tree(tree))
    line = f"{human_number(tree.parameters)} parameters, {human_bytes(tree.nbytes)}"
    if placement is not None:
        devices = math.prod(placement.mesh.shape.values())
        line += f"; {human_bytes(tree.device_bytes)} on each of {devices} devices"
    print_out("\n".join([line, *(f"replicated: {note}" for note in uncut)]), "\n")
    if placement is not None:
        mesh = dict(placement.mesh.shape)
        print_out(share_lines(tree), "\n")
        print_out(table(["device", "is"], list(enumerate(device_names(mesh)))[:16]))
        if shown := pictures(tree, mesh):
            headers = ["weights", "devices of each piece (first cut down, others across)"]
            print_out(table(headers, shown))
        else:
            print_out("Every device holds every weight whole.", "\n")
    rows = [
        (kind, each["layers"], _mask(each["call"]), name, reason)
        for kind, choices in kinds.items()
        for each in choices
        for name, reason in _in_short(each["mechanisms"])
    ]
    if rows:
        print_out(table(["attention", "layers", "mask", "mechanism", "why"], rows))
    else:
        print_out("No layer looks at other tokens by attention.")


def _in_short(mechanisms: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that are able in one row; why one is chosen, and why others refuse, in words."""
    able = [name for name, reason in mechanisms if reason == "able"]
    rest = [row for row in mechanisms if row[1] != "able"]
    return [*rest[:1], *([(", ".join(able), "able")] if able else []), *rest[1:]]


def _mask(call: dict[str, Any]) -> str:
    window = call["mask"]["window"]
    return ("causal" if call["mask"]["causal"] else "full") + (f", last {window}" if window else "")
