"""A model card for what a run exports: README.md, with the front matter that the hub reads."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
from pathlib import Path
from typing import Any

import jax

from flaxen import __version__
from flaxen.core.whole_file import whole_file
from flaxen.show.words import human_bytes, human_number
from flaxen.train.data.parts import names_of
from flaxen.train.run.log import Row
from flaxen.train.run.pace import clock
from flaxen.train.run.prepare import Run
from flaxen.train.settings.field import plain
from flaxen.train.settings.seeing import SeeingSettings

MARK = "<!-- Written by flaxen. Take this line out, and it is not written again. -->"

PICTURE = "loss.png"

TASKS = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
"""What the hub calls the task of a class of Transformers, by how its name ends."""

AUTO = {
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}

QUIET = ("output", "resume", *SeeingSettings.__dataclass_fields__)
"""Settings that say nothing of the result."""


def write_card(
    folder: Path, run: Run, data: Any, rows: list[Row], picture: Path | None, *, adapter: bool
) -> Path | None:
    """Write README.md into an exported folder, and the picture beside it. One that somebody else
    wrote stays, and then nothing is written.
    """
    path = folder / "README.md"
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return None
    if picture is not None:
        shutil.copyfile(picture, folder / PICTURE)
    text = card(folder.resolve(), run, data, rows, adapter=adapter, picture=picture is not None)
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")
    return path


def card(
    folder: Path, run: Run, data: Any, rows: list[Row], *, adapter: bool, picture: bool
) -> str:
    """The text of it."""
    parts = [
        _front(run, adapter),
        MARK,
        f"# {folder.parent.name}",
        _about(run, adapter),
        f"![Loss]({PICTURE})" if picture else "",
        "## Results\n\n" + _table(_results(rows)),
        "## Data\n\n" + _table(_data(run, data)),
        "## Settings\n\nThose that are not at their defaults.\n\n" + _table(_settings(run)),
        "## Computed with\n\n" + _table(_computed(run, rows)),
        "## Use\n\n" + _use(folder, run, adapter),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def hub_id(folder: Path | None) -> str | None:
    """owner/name of a folder in the hub's cache: `models--owner--name/snapshots/...`."""
    names = [] if folder is None else [part for part in folder.parts if part.startswith("models--")]
    return names[-1].removeprefix("models--").replace("--", "/") if names else None


def _front(run: Run, adapter: bool) -> str:
    import yaml

    base, task = hub_id(run.model.origin.folder), _task(run)
    front: dict[str, Any] = {}
    if base is not None:
        front["base_model"] = base
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    front["library_name"] = "peft" if adapter else "transformers"
    if task is not None:
        front["pipeline_tag"] = task
    lora = ["lora"] if run.config.lora_rank else []
    front["tags"] = ["flaxen", "jax", run.config.objective, *lora]
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---"


def _task(run: Run) -> str | None:
    classes = getattr(run.model.config, "architectures", None) or []
    found = [task for name in classes for end, task in TASKS.items() if name.endswith(end)]
    module = run.model.module
    if not found and getattr(module, "generates", False) and not hasattr(module, "encoder"):
        return "text-generation"
    return found[0] if found else None


def _about(run: Run, adapter: bool) -> str:
    folder = run.model.origin.folder
    base = hub_id(folder)
    name = f"[{base}](https://huggingface.co/{base})" if base else _code(_base(run) or "")
    kind = getattr(run.model.config, "model_type", "model")
    of = f"{name} ({kind})" if base or folder else f"a {kind} model"
    what = "A low-rank adapter of" if adapter else "Trained from"
    merged = " by a low-rank adapter, merged" if run.config.lora_rank and not adapter else ""
    return (
        f"{what} {of}{merged}, with the objective {_code(run.config.objective)}, "
        f"by flaxen {__version__}."
    )


def _results(rows: list[Row]) -> list[tuple[str, str]]:
    """First and last of what was measured."""
    tests = (row for row in rows if not row.keys().isdisjoint(("eval_loss", "eval_reward")))
    names = ("loss", "reward", *dict.fromkeys(key for row in tests for key in row))
    out = []
    for name in names:
        values = [row[name] for row in rows if name in row]
        if name in ("step", "eval_seconds") or not values:
            continue
        words = f"training {name}" if name in ("loss", "reward") else name.replace("_", " ")
        out.append((words, f"{values[0]:.4g} → {values[-1]:.4g}"))
    return out


def _data(run: Run, data: Any) -> list[tuple[str, str]]:
    out = [("files", ", ".join(map(_code, names_of(data))))]
    source: Any = run.source
    if hasattr(source, "count"):
        out.append(("examples", f"{source.count:,}"))
    out.append(("steps in a pass", f"{source.per_epoch:,}"))
    out.append(("hash of all tokens", _code(source.fingerprint())))
    return out


def _settings(run: Run) -> list[tuple[str, str]]:
    config, out = run.config, []
    for field in dataclasses.fields(config):
        value = plain(getattr(config, field.name))
        if field.name not in QUIET and value != plain(field.default):
            out.append((_code(field.name), _code(value)))
    return out


def _computed(run: Run, rows: list[Row]) -> list[tuple[str, str]]:
    steps = [row for row in rows if "loss" in row]
    mesh = run.runtime.placement.mesh if run.runtime.placement else None
    one = jax.devices()[0]
    count = 1 if mesh is None else mesh.size
    shape = "" if mesh is None else ", " + ", ".join(f"{k}={n}" for k, n in mesh.shape.items())
    tokens = sum(row["tokens"] for row in steps)
    out = [
        ("devices", f"{count} x {one.device_kind}{shape}"),
        ("steps", f"{run.steps:,}"),
        ("targets", human_number(tokens)),
        ("time", clock(sum(row["seconds"] for row in steps))),
    ]
    memory = [row["memory_bytes"] for row in steps if "memory_bytes" in row]
    out += [("most memory", human_bytes(max(memory)))] if memory else []
    versions = {"flaxen": __version__, "Python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("jax", "transformers")}
    return [*out, ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()))]


def _base(run: Run) -> str | None:
    """What the base is called: on the hub, or the last word of its folder, as paths tell nobody
    else anything.
    """
    folder = run.model.origin.folder
    return hub_id(folder) or (None if folder is None else folder.resolve().name)


def _use(folder: Path, run: Run, adapter: bool) -> str:
    name, base = folder.name, _base(run)
    auto = AUTO.get(_task(run) or "", "AutoModel")
    ours = f'import flaxen\n\nmodel, tok = flaxen.load("{name}"), flaxen.tokenizer("{name}")'
    if adapter:
        ours = f'import flaxen\n\nmodel = flaxen.load("{name}")  # on top of its base'
        if base is None:
            return f'```python\nmodel = base.load_adapter("{name}")\n```'
        theirs = (
            "from peft import PeftModel\n"
            f"from transformers import {auto}\n\n"
            f'base = {auto}.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(base, "{name}")'
        )
        return f"```python\n{ours}\n```\n\n```python\n{theirs}\n```"
    theirs = (
        f"from transformers import {auto}, AutoTokenizer\n\n"
        f'model = {auto}.from_pretrained("{name}")\n'
        f'tok = AutoTokenizer.from_pretrained("{name}")'
    )
    return f"```python\n{ours}\n```\n\n```python\n{theirs}\n```"


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|-|-|", *(f"| {name} | {value} |" for name, value in rows)])


def _code(value: Any) -> str:
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = "``" if "`" in text else "`"
    return f"{ticks}{text}{ticks}"
