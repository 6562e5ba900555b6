"""Cases: a sound checkpoint, one damaged file in it, and what is then done with it.

Case n of a seed is the same on every machine.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import gguf_files
import golden
import numpy as np
import quantized_files
import torch_files
from fuzz import mutations as m
from safetensors.numpy import save_file

TORCH = golden.DATA / "torch"
KIND = gguf.GGMLQuantizationType
DOCUMENT = {"eos_token_id": [2, 3], "pad_token_id": 0, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
DOCUMENT |= {"do_sample": True, "max_length": 30, "repetition_penalty": 1.1}


def prepare(folder: Path) -> None:
    """The sound checkpoints that all cases start from."""
    case = golden.case("llama")
    for shards in (1, 2):
        whole = golden.write_folder(case, folder / f"shards{shards}", shards=shards)
        (whole / "generation_config.json").write_text(json.dumps(DOCUMENT))
    shutil.copytree(folder / "shards1", folder / "torch")
    (folder / "torch" / "model.safetensors").unlink()
    torch_files.save(case.weights, folder / "torch" / "pytorch_model.bin")
    (folder / "gguf").mkdir()
    for kind in gguf_files.HALVES:
        _gguf(folder / "gguf" / f"{kind.name}.gguf", kind)
    gguf_files.write(folder / "gguf" / "all.gguf", "llama", _layer(), _told)
    _quantized(folder)
    _adapter(folder / "adapter")
    shutil.copytree(folder / "shards1", folder / "adapter" / "base")


def _quantized(folder: Path) -> None:
    """One weight of each method, with its settings; for fp8, a whole model."""
    draw, case = np.random.default_rng(0), golden.case("llama")
    ints = {"bits": 4, "group_size": 16, "modules_to_not_convert": ["lm_head"]}
    block = {"weight_block_size": [24, 16], "modules_to_not_convert": ["lm_head"]}
    made = {
        "fp8": (quantized_files.fp8(draw, 32, 48, (24, 16)), block),
        "awq": (quantized_files.awq(draw, 32, 48, 16), {**ints, "version": "gemm"}),
        "gptq": (quantized_files.gptq(draw, 32, 48, 16), {**ints, "checkpoint_format": "gptq"}),
        "mxfp4": (quantized_files.mxfp4(draw, 2, 64, 4), {}),
    }
    for method, (stored, settings) in made.items():
        link = "_" if method == "mxfp4" else "."
        tensors = {f"a{link}{role}": part for role, part in stored.parts.items()}
        config = {"quantization_config": {"quant_method": method, **settings}}
        quantized_files.write(folder / method, tensors, config)
    tensors = {}
    for name, array in case.weights.items():
        parts = {"weight": array}
        if name.endswith("_proj.weight"):
            parts = quantized_files.fp8(draw, *array.shape, (24, 16)).parts
        tensors |= {name.removesuffix("weight") + role: part for role, part in parts.items()}
    about = {"quantization_config": {"quant_method": "fp8", **block}}
    quantized_files.write(folder / "packed", tensors, case.config | about)


def _gguf(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    raw = (gguf_files.blocks(kind, 32, 256), kind)
    gguf_files.write(path, "qwen3", {"blk.0.ffn_down.weight": raw}, gguf_files.window)


def _told(writer: Any) -> None:
    """Metadata of all sorts."""
    writer.add_sliding_window(16)
    writer.add_key_length(gguf_files.HEAD_DIM)
    writer.add_value_length(gguf_files.HEAD_DIM)
    writer.add_rope_dimension_count(gguf_files.HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_expert_count(0)
    writer.add_uint16("split.count", 1)
    writer.add_uint32("general.alignment", 32)
    writer.add_tokenizer_model("gpt2")
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_token_types([1, 3, 3, 1, 1, 1, 1])
    writer.add_token_list(["a", "<|im_end|>", "<|eot_id|>", "b", "c", "d", "e"])


def _layer() -> dict[str, Any]:
    """All tensors of one layer of a llama, of several types."""
    hidden, inner = gguf_files.HIDDEN, gguf_files.INNER
    kv = gguf_files.KV_HEADS * gguf_files.HEAD_DIM
    sizes = {"attn_q": hidden, "attn_k": kv, "attn_v": kv, "attn_output": hidden}
    kinds = [KIND.Q4_0, KIND.Q8_0, KIND.Q5_1, KIND.Q4_1]
    rows = {"ffn_gate": inner, "ffn_up": inner}
    tensors: dict[str, Any] = {"output_norm.weight": gguf_files.random(hidden)}
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}.weight"] = gguf_files.random(hidden)
    for (name, size), kind in zip(sizes.items(), kinds, strict=True):
        tensors[f"blk.0.{name}.weight"] = (gguf_files.blocks(kind, size, hidden), kind)
    for name, size in rows.items():
        tensors[f"blk.0.{name}.weight"] = gguf_files.random(size, hidden).astype(np.float16)
    return tensors | {"blk.0.ffn_down.weight": gguf_files.random(hidden, inner)}


@functools.cache
def model(sound: Path) -> Any:
    """The model that adapters are put on."""
    import flaxen

    return flaxen.load(sound / "shards1")


def _adapter(folder: Path) -> None:
    folder.mkdir()
    config = golden.case("llama").config
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    key, tensors = "base_model.model.model.layers.1.self_attn.{}.lora_{}.weight", {}
    for name, count in heads.items():
        tensors[key.format(name, "A")] = gguf_files.random(2, config["hidden_size"])
        tensors[key.format(name, "B")] = gguf_files.random(count * config["head_dim"], 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(heads)}
    about |= {
        "base_model_name_or_path": "base",
        "bias": "none",
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))


def _file(base: str, name: str, damage: Callable[[bytes, Random], bytes], end: str = "load"):
    """A kind of case: a folder of which one file is damaged."""

    def make(sound: Path, folder: Path, rng: Random) -> tuple[str, Path]:
        shutil.copytree(sound / base, folder)
        (folder / name).write_bytes(damage((folder / name).read_bytes(), rng))
        return end, folder

    return make


def _one_of(bases: list[str], name: str, damage: Callable[[bytes, Random], bytes], end: str):
    """A kind of case: one of several folders, of which one file is damaged."""
    makers = [_file(base, name, damage, end) for base in bases]
    return lambda sound, folder, rng: rng.choice(makers)(sound, folder, rng)


def _single(base: str, pattern: str, damage: Callable[[bytes, Random], bytes], end: str):
    """A kind of case: one of several files, damaged."""

    def make(sound: Path, folder: Path, rng: Random) -> tuple[str, Path]:
        files = sorted((TORCH if base == "data" else sound / base).glob(pattern))
        chosen = rng.choice(files)
        folder.mkdir()
        (folder / chosen.name).write_bytes(damage(chosen.read_bytes(), rng))
        return end, folder / chosen.name

    return make


def _json(raw: bytes, rng: Random) -> bytes:
    return m.damaged_json(json.loads(raw), rng)


def _headed(raw: bytes, rng: Random) -> bytes:
    return rng.choice([m.damaged, m.damaged_header, m.damaged_header])(raw, rng)


def _zipped(raw: bytes, rng: Random) -> bytes:
    if not raw.startswith(b"PK"):
        return rng.choice([m.damaged, m.damaged_pickle])(raw, rng)
    return rng.choice([m.damaged, m.damaged_archive, m.damaged_archive])(raw, rng)


def _settings_of_codes(raw: bytes, rng: Random) -> bytes:
    """A config whose quantization_config is damaged, and only that."""
    config = json.loads(raw)
    text = m.damaged_json(config.pop("quantization_config"), rng)
    rest = json.dumps(config)[1:-1].encode()
    return b'{"quantization_config": ' + text + (b", " + rest if rest else b"") + b"}"


METHODS = ["fp8", "awq", "gptq", "mxfp4"]
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
KINDS: dict[str, Callable[[Path, Path, Random], tuple[str, Path]]] = {
    "safetensors": _file("shards1", "model.safetensors", _headed),
    "safetensors, bytes": _file("shards1", "model.safetensors", m.damaged),
    "safetensors, index": _file("shards2", INDEX, _json),
    "config": _file("shards1", "config.json", _json),
    "config, abstract": _file("shards1", "config.json", _json, "abstract"),
    "generation config": _file("shards1", "generation_config.json", _json, "settings"),
    "gguf": _single("gguf", "[QI]*.gguf", m.damaged, "read"),
    "gguf, model": _single("gguf", "all.gguf", m.damaged, "load"),
    "gguf, metadata": _single("gguf", "all.gguf", m.damaged_metadata, "load"),
    "quantised, config": _one_of(METHODS, "config.json", _settings_of_codes, "read"),
    "quantised, header": _one_of(METHODS, "model.safetensors", _headed, "read"),
    "quantised, model": _file("packed", "config.json", _settings_of_codes, "keep"),
    "torch": _file("torch", "pytorch_model.bin", _zipped),
    "torch, one file": _single("data", "*.pt", _zipped, "read"),
    "adapter": _file("adapter", ADAPTER, _headed, "adapter"),
    "adapter, config": _file("adapter", "adapter_config.json", _json, "adapter"),
    "adapter, load": _file("adapter", "adapter_config.json", _json),
}


def run(number: int, seed: int, sound: Path, folder: Path) -> str:
    """Make a case and do what it is for: nothing is returned but the kind of the case."""
    rng = Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    end, path = KINDS[kind](sound, folder, rng)
    if end == "adapter":
        _adapted(path, model(sound))
    else:
        ENDS[end](path, rng)
    return kind


def _read(path: Path, rng: Random) -> None:
    """Every tensor whole, by one box, and as a view."""
    from flaxen.convert.formats.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.values():
            tensor.read()
            tensor.view()
            cuts = [sorted(rng.randrange(n + 1) for _ in range(2)) for n in tensor.shape]
            tensor.read([slice(*cut) for cut in cuts])


def _load(path: Path, rng: Random) -> None:
    import flaxen

    if rng.random() < 0.3:
        _read(path, rng)
    else:
        # Weights that are absent would be drawn, by programs that take seconds to compile.
        lenient = rng.random() < 0.2
        flaxen.load(path, strict=not lenient, abstract=lenient)


def _keep(path: Path, rng: Random) -> None:
    import flaxen

    flaxen.load(path, quantized="keep")


def _abstract(path: Path, rng: Random) -> None:
    import flaxen

    flaxen.load(path, abstract=True, scan_layers=rng.random() < 0.2)


def _settings(path: Path, rng: Random) -> None:
    import flaxen
    from flaxen.generate.settings import resolve

    loaded = flaxen.load(path, abstract=True)
    resolve(loaded, 4, {"do_sample": rng.choice([None, True])})


def _adapted(path: Path, base: Any) -> None:
    from flaxen.families import find
    from flaxen.tune import load_adapter

    load_adapter(base.module, path, find("llama").names)


ENDS: dict[str, Callable[[Path, Random], None]] = {
    "read": _read,
    "load": _load,
    "keep": _keep,
    "abstract": _abstract,
    "settings": _settings,
}
