"""What is learned from, and how it is laid out."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Lengths are in tokens, `batch_size` in rows of one micro-batch over all devices.

    A step sees batch_size * accumulation rows of `seq_len` tokens.
    """

    batch_size: int = setting(4, "Rows in one micro-batch, over all devices.", least=1)
    accumulation: int = setting(1, "Micro-batches to one step.", least=1)
    seq_len: int = setting(512, "Tokens in a row.", least=2)
    packing: bool = setting(True, "Several short documents share a row.")
    seed: int = setting(0, "Order of the data, fresh weights, dropout.")
