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
    # Its products are made ready at their first run, which costs as much as a tenth of compiling.
    "--xla_cpu_experimental_ynn_fusion_type=",
]

# Set before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)
# With fewer threads than devices, collectives can wait for each other for ever.
os.environ["NPROC"] = "32"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The threads of NumPy's products would wait for work where jax has it.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# To write down what is compiled quickly costs more than it gives back.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
# Compiling asks for and gives back much memory. Read when a process starts: for the workers.
os.environ["MALLOC_TOP_PAD_"] = str(64 << 20)
os.environ["MALLOC_TRIM_THRESHOLD_"] = os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 30)
os.environ["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=4000"

# Tracing makes many small objects, of which few are garbage that only a collection finds.
gc.set_threshold(200_000, 20, 50)

LONGEST = [
    "families/test_golden.py",
    "families/test_golden_on_meshes.py",
    "generate/test_generate.py",
    "train/test_together.py",
    "train/test_going_on.py",
    "families/test_seq2seq.py",
    "train/test_objectives_rows.py",
    "families/test_seeing.py",
    "families/test_heads.py",
    "tests/test_recipes.py",
    "train/test_grpo.py",
    "train/test_step.py",
    "layers/test_row_shards.py",
    "tune/test_against_peft.py",
    "convert/test_together.py",
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
    """Programs that several processes of tests build are compiled once.

    One folder for each worker: jax's writes to it are not safe against another's reads. Within a
    worker hardly a program is built twice, and to write each down is an eighth of compiling it.
    """
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))


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
