"""Tiny random models with known outputs: what Transformers on torch computes for them in float32.

Weights are not stored; each is made again, bit by bit, from its name (tests/data/golden/README.md).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Case:
    """One tiny model: its configuration, weights, inputs and expected outputs.

    arrays: inputs and outputs by name; weights: tensors by hub name, in the layout of the file;
    about: the whole JSON file (`grad_norms`, `tied`, `gen_min_margin`, ...).
    """

    name: str
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.about["config"])

    @property
    def legacy_config(self) -> dict[str, Any]:
        """The same model in the older spelling, with rope settings at the top level."""
        change = self.about["config_legacy"]
        kept = {key: value for key, value in self.config.items() if key not in change["drop"]}
        return {**kept, **change["set"]}

    @property
    def sparse_config(self) -> dict[str, Any]:
        """Only what differs from the class defaults."""
        names = {
            "model_type": self.about["model_type"],
            "architectures": [self.about["architecture"]],
        }
        return {**names, **self.about["config_kwargs"]}

    @property
    def position_ids(self) -> np.ndarray | None:
        """Positions of the padded ids; None where a model takes none."""
        return self.arrays["position_ids"] if self.about["uses_position_ids"] else None

    @property
    def logits_pos(self) -> np.ndarray:
        """Logits of the padded ids at these positions."""
        return self.arrays["logits" if self.position_ids is None else "logits_pos"]

    @property
    def bound(self) -> float:
        """The largest error of a logit (tests/data/golden/README.md)."""
        return 2e-4 if self.name == "qwen3_next" else 5e-5

    @property
    def grad_norms(self) -> dict[str, float]:
        return dict(self.about["grad_norms"])


def cases(kind: str | None = "causal") -> list[str]:
    """The names of all cases of a kind, or of every kind: `@pytest.mark.parametrize("name",
    golden.cases())`.
    """
    names = sorted(path.stem for path in (DATA / "golden").glob("*.json"))
    return [name for name in names if kind in (None, about(name)["kind"])]


def about(name: str) -> dict[str, Any]:
    """The JSON file of a case alone."""
    return json.loads((DATA / "golden" / f"{name}.json").read_text())


@functools.cache
def case(name: str) -> Case:
    """Read a case and make its weights again."""
    description = about(name)
    with np.load(DATA / "golden" / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    weights = {
        key: arrays[f"weights/{key}"] if base is None else weight(key, shape, base, scale, dtype)
        for key, shape, dtype, base, scale in description["tensors"]
    }
    return Case(name, description, arrays, weights)


def by_path(case: Case, abstract: Any, names: Any) -> dict[str, np.ndarray]:
    """The weights under our paths, in the order of our axes."""
    from flaxen.convert.arrays import ArrayTensor
    from flaxen.convert.relation import relate

    tensors = {key: ArrayTensor(array) for key, array in case.weights.items()}
    return {path: t.read() for path, t in relate(abstract, names).load(tensors).items()}


def smollm2() -> dict[str, Any]:
    """Ids, top logits and mean loss of SmolLM2-135M-Instruct (GGUF Q4_1), from plain NumPy."""
    return json.loads((DATA / "smollm2.json").read_text())


def weight(
    key: str, shape: list[int], base: float, scale: float, dtype: str = "float32"
) -> np.ndarray:
    """Uniform numbers around `base`, seeded by the name; the same bits with every NumPy."""
    seed = int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest()[:8], "little")
    raw = np.random.Philox(key=seed).random_raw(int(np.prod(shape, dtype=np.int64)))
    unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    return (np.float32(base) + np.float32(scale) * unit).reshape(shape).astype(dtype)


def logits_loss_and_gradients(case: Case, model: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """What a model makes of the padded ids at given positions, by one compiled program."""
    import jax

    x = case.arrays

    @jax.jit
    def run(model: Any) -> Any:
        def loss(model: Any) -> Any:
            ids, mask, labels = x["input_ids"], x["attention_mask"], x["labels"]
            out = model(ids, mask, case.position_ids, labels=labels)
            return out.loss, out.logits

        return jax.value_and_grad(loss, has_aux=True)(model)

    (loss, logits), grads = run(model)
    return np.asarray(logits), np.asarray(loss), grads


def write_folder(
    case: Case, path: Path | str, *, legacy: bool = False, sparse: bool = False, shards: int = 1
) -> Path:
    """Write the case as a Hugging Face folder; `shards` > 1 splits it into files with an index."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = case.legacy_config if legacy else case.sparse_config if sparse else case.config
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(case.weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    keys = list(case.weights)
    where = {
        key: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, key in enumerate(keys)
    }
    for file in sorted(set(where.values())):
        part = {key: case.weights[key] for key in keys if where[key] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(array.nbytes for array in case.weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def adapter_tensors(rows: list[Any]) -> dict[str, np.ndarray]:
    """The tensors of an adapter's case, made again from their names."""
    return {key: weight(key, shape, base, scale) for key, shape, base, scale in rows}


def write_adapter(name: str, path: Path | str, base: Path | str | None = None) -> Path:
    """Write the adapter of a case (tests/data/adapters) as the folder that PEFT wrote."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    about = json.loads((DATA / "adapters" / f"{name}.json").read_text())
    config = about["config"] | {"base_model_name_or_path": None if base is None else str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = adapter_tensors(about["tensors"])
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
