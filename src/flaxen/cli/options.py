"""Options that several commands share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.model import Model

UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def whole_number(text: str) -> int:
    """32k -> 32000, 32K -> 32768, 25.6k -> 25600, 1_000 -> 1000."""
    match = re.fullmatch(r"([0-9_]+(?:\.[0-9]+)?)([kKmMgG]?)", text.strip())
    size = float(match[1].replace("_", "")) * UNITS[match[2]] if match else math.nan
    if not size.is_integer():
        raise ValueError(
            f"{text!r} is no whole number; write for example 4096, 32k (32,000) or 32K (32,768)."
        )
    return int(size)


def _converted(_: Any, tokens: Sequence[Token]) -> int:
    return whole_number(tokens[0].value)


def about(text: str, **more: Any) -> Parameter:
    """A parameter's help."""
    return Parameter(help=text, **more)


def no_option(_: Any, text: str | None) -> None:
    """A text may begin with a hyphen, so a mistyped option must not become one."""
    if text is not None and re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", text):
        raise ValueError(f"Unknown option {text}; see --help.")


def no_options(kind: Any, texts: Sequence[str]) -> None:
    """`no_option` for several texts."""
    for text in texts:
        no_option(kind, text)


Count = Annotated[int, Parameter(converter=_converted)]
Json = Annotated[bool, about("Print one JSON object instead of text.", name="--json")]
KeyMapping = Annotated[
    list[str] | None, about("REGEX=NAME: what keys of the checkpoint are called; may be repeated.")
]
Download = Annotated[
    bool, about("Fetch the files of a hub id; otherwise only their headers are read.")
]
Source = Annotated[str, about("A Hugging Face folder, a hub id or a file of weights.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded."""

    dtype: Annotated[str | None, about("float32, bfloat16, ...; default: as stored.")] = None
    mesh: Annotated[str | None, about("Devices by axis, for example fsdp=2,tp=4.")] = None
    plan: Annotated[str | None, about("Name of a sharding plan; default: auto.")] = None
    attention: Annotated[str, about("An attention mechanism's name, or auto.")] = "auto"
    adapter: Annotated[str | None, about("A PEFT adapter folder to put on top.")] = None
    revision: Annotated[str | None, about("Branch, tag or commit of a hub id.")] = None
    key_mapping: KeyMapping = None

    def load(self, source: str, **more: Any) -> Model:
        """Load a model as these options say."""
        enough_cpu_devices(self.mesh)
        keep_programs()
        import flaxen

        return flaxen.load(source, **self.given(), **more)

    def tokenizer(self, source: str) -> Any:
        """The tokenizer beside a model; an adapter without one has that of its base."""
        import flaxen
        from flaxen.core.errors import CheckpointError

        try:
            return flaxen.tokenizer(source, revision=self.revision)
        except CheckpointError:
            from flaxen.adapter import base_of

            base = base_of(source)
            if base is None:
                raise
            return flaxen.tokenizer(base)

    def look(self, source: str, download: bool, **more: Any) -> Model:
        """The abstract model; of a hub id only headers are read, unless it is to be downloaded."""
        import flaxen

        return flaxen.load(
            source,
            dtype=self.dtype,
            revision=self.revision,
            key_mapping=renames(self.key_mapping),
            remote=from_afar(download),
            abstract=True,
            scan_layers=False,
            **more,
        )

    def given(self) -> dict[str, Any]:
        """The options under the names of `flaxen.load`."""
        given = _given(self)
        return given | {"key_mapping": renames(self.key_mapping)} if self.key_mapping else given


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; greedy if nothing is given."""

    temperature: Annotated[float | None, about("0 is greedy.")] = None
    top_k: Annotated[int | None, about("Only the k likeliest tokens.")] = None
    top_p: Annotated[float | None, about("Only the likeliest tokens that make up p.")] = None
    min_p: Annotated[float | None, about("Only tokens with p times the best's chance.")] = None
    repetition_penalty: Annotated[float | None, about("Above 1: rarer repetition.")] = None
    seed: Annotated[int | None, about("The same seed, the same text.")] = None

    def given(self) -> dict[str, Any]:
        """What was asked for, under the names of `generate.stream`."""
        return _given(self)


def _given(options: Any) -> dict[str, Any]:
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def renames(key_mapping: Sequence[str] | None) -> dict[str, str] | None:
    """What `--key-mapping` says, as `flaxen.load` takes it.

    Raises:
        InputError: a rule without `=`.
    """
    wrong = next((rule for rule in key_mapping or () if "=" not in rule), None)
    if wrong is not None:
        raise InputError(f"--key-mapping {wrong!r} lacks a '='; write for example '^module\\.='.")
    pairs = (rule.rpartition("=") for rule in key_mapping or ())
    return {pattern: name for pattern, _, name in pairs} or None


def from_afar(download: bool) -> bool:
    """Whether a hub id is read where it is; without a network its copy in the cache is used."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return not (download or offline)


def keep_programs() -> None:
    """Keep compiled programs in the user's cache folder: the next call of a command starts sooner.

    A folder that jax was told of already stays.
    """
    import jax

    settings: Any = jax.config
    if not settings.jax_compilation_cache_dir:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "flaxen" / "programs"))


def enough_cpu_devices(mesh: str | None, processes: int = 1) -> None:
    """Where the CPU is all there is, split it into as many devices as the mesh asks for, of several
    processes each its part.
    """
    if mesh is None or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    import jax

    from flaxen.shard import parse_mesh

    wanted = math.prod(size for size in parse_mesh(mesh).values() if size > 0)
    jax.config.update("jax_num_cpu_devices", max(wanted // processes, 1))
