"""Eight virtual CPU devices for every test, set before jax is imported."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
# With fewer threads than devices, collectives can wait for each other for ever.
os.environ["NPROC"] = "32"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
