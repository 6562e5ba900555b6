"""A run as a YAML file, one key for each setting."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.train.settings.field import described, plain
from flaxen.train.settings.run_config import RunConfig
from flaxen.train.settings.training import GROUPS

FIRST = ("model", "data", "output")
"""What a file begins with."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a file, by name; `-` is standard input.

    Raises:
        ConfigError: it cannot be read, is no YAML or no mapping.
    """
    import yaml

    try:
        text = sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
        path = "Standard input" if str(path) == "-" else path
        _check_once(yaml.compose(text, yaml.SafeLoader), path)
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is no file of settings: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}; expected lines of `key: value`.")
    return found


def _check_once(node: Any, path: str | Path) -> None:
    """
    Raises:
        ConfigError: a key that a file has twice, of which YAML would silently take the last.
    """
    pairs = node.value if node is not None and node.id == "mapping" else ()
    lines: dict[Any, int] = {}
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.id == "scalar" and lines.setdefault(key.value, line) != line:
            first = lines[key.value]
            raise ConfigError(f"{path} has {key.value!r} twice, in lines {first} and {line}.")


def as_yaml(config: RunConfig) -> str:
    """Every setting with its value, and a comment that says what it is, group by group."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    lines: list[str] = []
    for title, names in _groups(fields):
        lines.append(f"\n# {title}")
        lines += [_line(fields[name], getattr(config, name)) for name in names]
    return "\n".join(lines).lstrip() + "\n"


def _groups(fields: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    own = {name for group in GROUPS for name in group.__dataclass_fields__}
    rest = [name for name in fields if name not in own and name not in FIRST]
    yield "Model and data", [*FIRST, *rest]
    for group in GROUPS:
        title = group.__name__.removesuffix("Settings")
        yield title, list(group.__dataclass_fields__)


def _line(field: Any, value: Any) -> str:
    import yaml

    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10**6).strip()
    entry = f"{field.name}: {text.removesuffix('...').strip()}"
    return f"{entry:<40}  # {described(field)}"
