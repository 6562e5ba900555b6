"""Files of other programs, which hold weights that are not read here, by their names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

MADE_BY = {
    "model.bin": "CTranslate2",
    "*.onnx": "ONNX",
    "*.h5": "TensorFlow",
    "*.ckpt.index": "TensorFlow",
    "*.tflite": "TensorFlow Lite",
    "*.msgpack": "Flax",
    "*.ot": "rust-bert",
    "*.mlmodel": "Core ML",
    "*.mlpackage": "Core ML",
    "*.mlmodelc": "Core ML",
    "openvino_*.xml": "OpenVINO",
    "*.npz": "MLX",
    "*.engine": "TensorRT",
    "*.pte": "ExecuTorch",
    "*.nemo": "NeMo",
    "consolidated.*.pth": "Meta's own code",
}


def foreign(names: Iterable[str]) -> str:
    """A sentence about the first of these files that is of another program, or nothing."""
    for name in names:
        for pattern, program in MADE_BY.items():
            if fnmatch(name, pattern):
                return (
                    f" {name} is a file of {program}, which cannot be read; fetch the Hugging Face "
                    "folder (safetensors) that it was made from."
                )
    return ""
