"""How a run is spread and what it may use."""

from __future__ import annotations

import dataclasses

from flaxen.layers.checkpointing import Checkpointing, checkpointing_of
from flaxen.train.settings.field import names_in, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """`remat` computes activations again in the backward pass: True, or a policy of
    `layers.checkpointing.POLICIES`; `remat_every` n does so for every n-th layer.
    """

    remat: bool | str = setting(
        False,
        "Less memory, more time; true is block.",
        choices=names_in("flaxen.layers.checkpointing:POLICIES", False, True),
        free=True,
    )
    remat_every: int = setting(1, "Do so for every n-th layer.", least=1, free=True)

    def checkpointing(self) -> Checkpointing | None:
        """What `remat` asks for; None leaves it to the model."""
        how = checkpointing_of(self.remat)
        return dataclasses.replace(how, every=self.remat_every) if self.remat else None
