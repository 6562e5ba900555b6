"""How much memory there is, and how much was used."""

from __future__ import annotations

import os
import resource
import sys

import jax


def peak_memory() -> int:
    """The most bytes held so far: on one device if devices tell, else by this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def device_memory() -> int:
    """Bytes that one device can hold; CPU devices share the memory of the host."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [limit for limit in limits if limit]
    return min(known) if known else host_memory() // jax.local_device_count()


def host_memory() -> int:
    """Bytes of memory that the host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
