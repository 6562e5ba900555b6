"""The documented names of EasyDeL's base classes, over this library: no logic of their own."""

from flaxen.easydel.config import AutoEasyDeLConfig, EasyDeLPretrainedConfig
from flaxen.easydel.model import (
    AutoEasyDeLModelForCausalLM,
    EasyDeLFlaxPretrainedModel,
    EasyDeLState,
)

__all__ = [
    "AutoEasyDeLConfig",
    "AutoEasyDeLModelForCausalLM",
    "EasyDeLFlaxPretrainedModel",
    "EasyDeLPretrainedConfig",
    "EasyDeLState",
]
