"""Flash attention, our kernel and the choice among kernels, against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from attention.flash_cases import case, compare

from flaxen.attention import AttentionSettings, Mask

rng = np.random.default_rng(5)
DOCUMENTS = np.repeat([[0, 1, 2], [5, 5, 6]], [20, 30, 20], axis=1)
LEFT = np.arange(70)[None] >= np.array([[9], [0]])
RIGHT = np.arange(70)[None] < np.array([[70], [41]])
CASES = {
    "causal": case(),
    "one token": case(T=1),
    "127": case(T=127, batch=1),
    "128": case(T=128, batch=1),
    "129, default blocks": case(T=129, batch=1, settings=AttentionSettings()),
    "one key head": case(K=1),
    "as many key heads": case(K=4),
    "window": case(mask=Mask(window=11)),
    "window both ways": case(mask=Mask(causal=False, window=9)),
    "chunks": case(mask=Mask(chunk=24)),
    "chunks both ways": case(mask=Mask(causal=False, chunk=24)),
    "prefix": case(mask=Mask(prefix=True, window=20), prefix=[33, 0]),
    "bidirectional": case(mask=Mask(causal=False)),
    "left padding": case(keep=LEFT),
    "right padding": case(keep=RIGHT),
    "packed": case(segments=DOCUMENTS),
    "softcap": case(softcap=1.5),
    "sinks": case(sinks=[0.5, -1, 2, 0]),
    "sinks where a row sees nothing": case(sinks=[0.5, -1, 2, 0], keep=LEFT),
    "alibi": case(slopes=[0.5, 0.25, 0.1, 0.05]),
    "narrower values": case(Hv=5),
    "everything": case(
        mask=Mask(window=30),
        keep=LEFT,
        segments=DOCUMENTS,
        softcap=2.0,
        sinks=[0.5, -1, 2, 0],
        slopes=[0.5, 0.25, 0.1, 0.05],
        Hv=5,
    ),
    "one query to a cache": case(
        T=1, S=40, first=17, keep=[[True] * 25 + [False] * 15] * 2, nan_keys=range(18, 40)
    ),
    "some queries to a cache": case(T=5, S=40, first=17, nan_keys=range(22, 40)),
    "a window over a cache": case(
        T=5, S=40, first=17, mask=Mask(window=6), nan_keys=[*range(12), *range(22, 40)]
    ),
    "other keys": case(T=7, S=45, first=0, mask=Mask(causal=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_our_kernel_equals_float64(name):
    compare("pallas_flash", CASES[name])
