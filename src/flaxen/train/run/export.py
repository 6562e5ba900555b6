"""What a finished run leaves: the model, its adapters, a picture."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from flaxen.convert.swap import writing
from flaxen.families import find
from flaxen.show import loss_picture
from flaxen.train.run.card import write_card
from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run, relation_of
from flaxen.train.run.result import Result
from flaxen.train.step import TrainState, trained_tree
from flaxen.tune import adapters, merge, save_adapter


def finish(run: Run, log: Log, step: int, state: TrainState, signal: int, data: Any) -> Result:
    """The trained model and, if no signal ended the run before, its files; data: what was learned
    from.
    """
    output, tree = run.output, trained_tree(state, run.tree)
    model = run.model.replace(module=merge(tree) if adapters(tree) else tree)
    result = Result(model, output, log.path, step, not signal, log.rows(), signal=signal or None)
    if not result.finished:
        return result
    files: dict[str, Path] = {"model_path": output / "model"}
    model.save(files["model_path"], tokenizer=run.tok)
    if adapters(tree):
        family = find(run.model.config.model_type)
        files["adapter_path"] = save_adapter(
            tree,
            output / "adapter",
            relation_of(run.model),
            rank_stabilised=run.config.lora_rank_stabilised,
            fan_in_fan_out=family.fan_in_fan_out,
            base=str(run.model.origin.folder) if run.model.origin.folder else None,
        )
    if log.first:
        with writing(output):
            if result.losses and importlib.util.find_spec("matplotlib"):
                files["picture_path"] = loss_picture(log.path, output / "loss.png")
            for kind in ("model", "adapter"):
                if (folder := files.get(f"{kind}_path")) is not None:
                    picture = files.get("picture_path")
                    write_card(folder, run, data, result.rows, picture, adapter=kind == "adapter")
    return dataclasses.replace(result, **files)
