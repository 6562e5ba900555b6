"""Several processes as one: each has devices of its own, and every mesh spans them all."""

from __future__ import annotations

import os
import re
import sys

from flaxen.core.errors import ConfigError

AUTO = "auto"


def join(
    coordinator: str | None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Make this process one of several, before the first array; once is enough.

    coordinator: HOST:PORT of process 0; or auto, where SLURM, Open MPI, Kubernetes or a TPU pod
    tell all three; None leaves the process alone.

    Raises:
        ConfigError: something is left out, or nothing tells it.
    """
    if coordinator is None:
        if num_processes is not None or process_id is not None:
            raise ConfigError(
                "num_processes and process_id need a coordinator: HOST:PORT of process 0, or auto."
            )
        return
    import jax

    if jax.distributed.is_initialized():
        return
    # A signal would be noted by its service alone; a run agrees on when to stop by itself.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator != AUTO:
        _check(coordinator, num_processes, process_id)
        jax.distributed.initialize(coordinator, num_processes, process_id)
        return
    try:
        jax.distributed.initialize(num_processes=num_processes, process_id=process_id)
    except ValueError as error:
        raise ConfigError(
            f"Nothing tells which processes there are ({error}) Give coordinator=HOST:PORT, "
            "num_processes and process_id."
        ) from error


def joined() -> bool:
    """Whether this process is one of several."""
    import jax

    return jax.distributed.is_initialized()


def leave(status: int) -> None:
    """End this process at once, as after an error that the others do not have. At its usual end it
    would wait for them for minutes, and they for it; so they learn of it by its heartbeat.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status)


def _check(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    if not re.fullmatch(r".+:\d+", coordinator):
        raise ConfigError(f"coordinator is {coordinator!r}, expected HOST:PORT, or auto.")
    if num_processes is None or process_id is None:
        raise ConfigError(
            f"coordinator={coordinator} needs num_processes, and process_id from 0 on."
        )
    if not 0 <= process_id < num_processes:
        raise ConfigError(f"process_id is {process_id}, expected 0 to {num_processes - 1}.")
