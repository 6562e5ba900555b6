"""Settings of a model's configuration, as an object or as the dict of its file."""

from __future__ import annotations

from typing import Any


def setting(config: Any, name: str, default: Any = None) -> Any:
    """One setting; the default also stands for one that is None."""
    found = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return default if found is None else found


def text_config(config: Any) -> Any:
    """The configuration of the text model inside a larger one."""
    if not isinstance(config, dict) and hasattr(config, "get_text_config"):
        return config.get_text_config()
    return setting(config, "text_config", config)
