"""Writes the files of this folder with PyTorch (2.13): python make.py"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

HERE = Path(__file__).parent
DTYPES = [
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz",
    "float8_e8m0fnu int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128",
]


def state_dict() -> OrderedDict:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    noted = torch.nn.Parameter(torch.tensor([7.0, 8.0]))
    noted.note = "an attribute"
    state = OrderedDict(
        whole=base,
        transposed=base.t(),
        sliced=base[1:, ::2],
        row=base[2],
        expanded=torch.tensor([[5.0]]).expand(3, 2),
        separate=torch.arange(3, dtype=torch.int64),
        parameter=torch.nn.Parameter(torch.tensor([1.0, 2.0])),
        noted=noted,
        scalar=torch.tensor(3.5),
        empty=torch.empty(0, 3),
    )
    state._metadata = OrderedDict({"": {"version": 1}})
    return state


def main() -> None:
    state = state_dict()
    torch.save(state, HERE / "zip.pt")
    torch.save(state, HERE / "stream.pt", _use_new_zipfile_serialization=False)
    torch.save(dict(state), HERE / "protocol5.pt", pickle_protocol=5)
    kinds = {name: getattr(torch, name) for line in DTYPES for name in line.split()}
    dtypes = {name: torch.tensor([0, 1, 1, 0]).to(kind) for name, kind in kinds.items()}
    torch.save(dtypes, HERE / "dtypes.pt")
    torch.save(dtypes, HERE / "dtypes_stream.pt", _use_new_zipfile_serialization=False)
    module = torch.nn.Linear(2, 2)
    module.weight.data = torch.arange(4.0).reshape(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    module.weight.data = torch.arange(4.0).reshape(2, 2)
    whole = {"epoch": 3, "optimizer": optimizer.state_dict()}
    torch.save(whole | {"state_dict": module.state_dict()}, HERE / "training.pt")
    torch.save(
        whole | {"model": module.state_dict()},
        HERE / "training_stream.pt",
        _use_new_zipfile_serialization=False,
    )
    torch.save(module, HERE / "module.pt")
    torch.save({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, HERE / "q.pt")
    torch.save({"c": torch.ones(2, dtype=torch.complex64).conj()}, HERE / "conj.pt")
    torch.save({"s": torch.eye(2).to_sparse()}, HERE / "sparse.pt")
    torch.jit.script(module).save(HERE / "script.pt")


if __name__ == "__main__":
    main()
