"""Eight virtual CPU devices for every test, and compiling that is quick rather than thorough."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

XLA_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    # Tiny programs, run once or twice: most of the time of a test is compiling.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_prefer_vector_width=128",
    # Emitting LLVM straight from HLO takes a third of the time that going by MLIR does.
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
]

# Set before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)
# With fewer threads than devices, collectives can wait for each other for ever.
os.environ["NPROC"] = "32"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# To write down what is compiled quickly costs more than it gives back.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

# Tracing makes many small objects: at the usual 700, a fifth of the time is looking for garbage.
gc.set_threshold(100_000, 20, 50)

LONGEST = [
    "families/test_golden.py",
    "families/test_golden_on_meshes.py",
    "families/test_seeing.py",
    "families/test_seq2seq.py",
    "models/test_fold.py",
    "quantize/test_rounded_model.py",
    "convert/test_quantized_training.py",
    "convert/test_together.py",
    "cache/test_recurrent.py",
    "generate/test_generate.py",
    "train/test_loop.py",
    "train/test_step.py",
    "easydel/test_documented_page.py",
]
"""These files run first, so that no worker works long after the other has ended."""


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(rank)))


@pytest.fixture(scope="session", autouse=True)
def _modules_are_not_garbage():
    """What stays for the whole session is not looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory):
    """A program that is built again, by a process of its own too, is not compiled again.

    One folder for each worker: jax's writes to it are not safe against another's reads.
    """
    import jax

    folder = str(tmp_path_factory.mktemp("compiled"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)


MAPS, MANY = Path("/proc/self/maps"), 25_000


@pytest.fixture(scope="module", autouse=True)
def _programs_do_not_pile_up():
    """Each compiled program is mapped into memory in several pieces, of which Linux allows 65,530
    in a process; past that, compiling ends in a segmentation fault.
    """
    yield
    import jax

    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()
