"""`flaxen train`: a run from flags, from a file, or from a file with flags over it."""

from __future__ import annotations

import importlib.util
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.options import Json, about, enough_cpu_devices, keep_programs, no_option
from flaxen.cli.output import print_json, remark
from flaxen.cli.train_flags import Flags, given
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.train import Result
    from flaxen.train.settings import RunConfig

RANK = 8
"""Of adapters, unless another one, --full or a file is given."""


def train(
    model: Annotated[
        str | None, about("A Hugging Face folder, a hub id or a file of weights.")
    ] = None,
    data: Annotated[
        list[str] | None,
        about("What is learned from: files, globs, folders, hf:owner/name; FILE=3 has a weight."),
    ] = None,
    *,
    config: Annotated[
        str | None,
        about(
            "A YAML file of settings, or - for stdin; flags win over it.",
            allow_leading_hyphen=True,
            validator=no_option,
        ),
    ] = None,
    full: Annotated[bool, about("Train all weights instead of adapters.")] = False,
    print_config: Annotated[
        bool, about("Print all settings as YAML instead, for --config.")
    ] = False,
    flags: Flags = Flags(),  # type: ignore[valid-type]
    json: Json = False,
) -> int:
    """Train a model: in full, with low-rank adapters, from preferences, rewards, a teacher.

    In the output folder: log.jsonl, loss.png, checkpoints/, model/ (a Hugging Face folder, adapters
    merged) and adapter/ (a PEFT folder). Ctrl-C saves a checkpoint; --resume goes on from it.
    """
    from flaxen.train.settings import as_yaml, read_yaml, run_config

    values, asked = read_yaml(config) if config else {}, given(flags)
    if full:
        _only_full(asked)
    values |= asked | ({"model": model} if model else {}) | ({"data": data} if data else {})
    settings = run_config(_defaults(values, full, bool(config)), _name(config))
    if print_config:
        print(as_yaml(settings), end="")
        return 0
    result = run(settings, progress=not json)
    import jax

    if jax.process_index() == 0:
        print_json(_told(result)) if json else _tell(result)
    # As after any Ctrl-C, what a shell would do next is not done; SIGTERM was obeyed.
    return 130 if result.signal == signal.SIGINT else 0


def run(settings: RunConfig, progress: bool = False) -> Result:
    """Load what a run names, and do it."""
    import dataclasses

    import flaxen
    from flaxen.shard.processes import join
    from flaxen.train import train
    from flaxen.train.data.parts import parts_of
    from flaxen.train.run.folder import check_output
    from flaxen.train.run.prepare import check_objective
    from flaxen.train.run.sinks import check_sinks

    check_sinks(settings)
    for data in (settings.data, settings.eval_data):
        if data is not None:
            parts_of(data, settings.columns)  # before a model is loaded
    rewards = [function_of(name) for name in _listed(settings.reward)]
    check_objective(settings)
    check_output(settings.output)
    # What orbax's threads log in full, our error says in a line.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    join(settings.coordinator, settings.num_processes, settings.process_id)
    mesh = settings.mesh or ("fsdp=-1" if settings.coordinator else None)
    enough_cpu_devices(mesh, settings.num_processes or 1)
    keep_programs()
    where = {"mesh": mesh, "plan": settings.plan, "attention": settings.attention}
    load = lambda source, **more: flaxen.load(
        source, dtype=settings.load_dtype, revision=settings.revision, **where, **more
    )
    tok = flaxen.tokenizer(settings.tokenizer or settings.model, revision=settings.revision)
    head = {"task": settings.task, "num_labels": settings.num_labels} if settings.task else {}
    model = fresh(settings, where) if settings.fresh else load(settings.model, **head)
    if settings.bits is not None:
        model = model.quantize(settings.bits)
    return train(
        model,
        tok,
        settings.data,
        dataclasses.replace(settings.training(), progress=progress),
        eval_data=settings.eval_data,
        reference=None if settings.reference is None else load(settings.reference),
        reward=rewards or None,
    )


def _listed(paths: str | Sequence[str] | None) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths or ())


def fresh(settings: RunConfig, where: dict[str, Any]) -> Any:
    """A model of random weights, as the config of a folder or a hub id describes it."""
    from flaxen.convert.formats.config_file import model_config
    from flaxen.fresh import from_config

    config = model_config(settings.model, revision=settings.revision)
    return from_config(config, seed=settings.seed, dtype=settings.load_dtype or "float32", **where)


def function_of(name: str) -> Any:
    """The function that FILE.py:NAME names; the file is the user's own, and is run.

    Raises:
        InputError: there is none, or the file fails.
    """
    path, _, function = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise InputError(f"{name!r} names no function; write FILE.py:NAME, of a file that exists.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no file of Python; write FILE.py:NAME.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise InputError(f"{path} defines no function {function!r}.")
    return getattr(module, function)


def _name(config: str | None) -> str:
    return "Standard input" if config == "-" else config or "The settings"


def _only_full(asked: dict[str, Any]) -> None:
    """
    Raises:
        InputError: flags that are of adapters.
    """
    from flaxen.train.settings.adapter import AdapterSettings

    names = [name for name in asked if name in AdapterSettings.__dataclass_fields__]
    if names:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InputError(f"--full trains all weights, and {flags} adapters; give one of them.")


def _defaults(values: dict[str, Any], full: bool, file: bool) -> dict[str, Any]:
    """What is not said, as most people want it; a file says it all."""
    from flaxen.train.settings.adapter import AdapterSettings

    if full:
        values = {k: v for k, v in values.items() if k not in AdapterSettings.__dataclass_fields__}
    if file:
        return values
    if full:
        return {"learning_rate": 1e-5} | values
    rank = values.get("lora_rank", RANK)
    alpha = 2.0 * max(rank, 1)  # so that of a rank below 1 the rank alone is told
    return {"lora_rank": rank, "lora_alpha": alpha, "learning_rate": 2e-4} | values


def _told(result: Result) -> dict[str, Any]:
    paths = ("log_path", "model_path", "adapter_path", "picture_path")
    return {
        "step": result.step,
        "finished": result.finished,
        "losses": result.losses,
        "rewards": result.rewards,
        "perplexities": result.perplexities,
        "tokens_per_second": result.tokens_per_second,
        **{name: getattr(result, name) for name in paths},
    }


def _tell(result: Result) -> None:
    for name, where in (("reward", ""), ("eval_reward", " on held-out prompts")):
        rows = [row for row in result.rows if name in row]
        if rows:
            ends = (f"{x[name]:.3f} ± {x[f'{name}_std']:.3f}" for x in (rows[0], rows[-1]))
            remark(f"Reward{where} {' -> '.join(ends)}")
    if result.losses:
        first, last = result.losses[0], result.losses[-1]
        remark(f"Loss {first:.4f} -> {last:.4f}, {result.tokens_per_second:,.0f} tokens/s")
    found = list(result.perplexities.values())
    if found:
        remark(f"Perplexity on held-out data {found[0]:.2f} -> {found[-1]:.2f}")
    if not result.finished:
        remark(f"Stopped at step {result.step}; the checkpoint is kept: go on with --resume.")
    for kind in ("model", "adapter", "picture", "log"):
        path = getattr(result, f"{kind}_path")
        if path is not None:
            remark(f"{kind.capitalize()}: {path}")
