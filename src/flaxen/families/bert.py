"""BERT, and Nomic's: BERT's layers with a rope and a gated network."""

from __future__ import annotations

from typing import Any

from flaxen.convert.ops import Chunk
from flaxen.convert.transforms import WeightConverter, WeightRenaming
from flaxen.core.errors import ConfigError
from flaxen.families.common import head_dim, rotary
from flaxen.families.encoders import (
    HEADS,
    asked_head,
    both_ways,
    encoder,
    masked,
    masked_lm,
    norm,
    of_pooled,
    pooler,
    to_labels,
    types,
)
from flaxen.families.family import Family, family
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.post_norm import PostNormBlock
from flaxen.models.encoder import Encoder
from flaxen.models.heads import Bare, Head, PretrainingHead

FAMILIES: dict[str, Family] = {}


def bert_layers(prefix: str) -> dict[str, str]:
    """The names of BERT's layers and their embeddings."""
    return {
        "embed_tokens": f"{prefix}.embeddings.word_embeddings",
        "embed_positions": f"{prefix}.embeddings.position_embeddings",
        "embed_types": f"{prefix}.embeddings.token_type_embeddings",
        "embed_norm": f"{prefix}.embeddings.LayerNorm",
        "layers": f"{prefix}.encoder.layer",
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.o_proj": "attention.output.dense",
        "post_attention_layernorm": "attention.output.LayerNorm",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "post_feedforward_layernorm": "output.LayerNorm",
        "head.pooler.dense": f"{prefix}.pooler.dense",
        "head.choice": "classifier",
        "head.classifier": "classifier",
        "head.qa_outputs": "qa_outputs",
    }


PREDICTIONS = {
    "head.transform.dense": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
    "head.decoder": "cls.predictions.decoder",
    "head.bias": "cls.predictions.bias",
    "head.unused": "cls.predictions.bias",
    "head.out_proj": "classifier",
}

BERT = (
    bert_layers("bert")
    | PREDICTIONS
    | {"head.hidden.dense": "bert.pooler.dense", "head.seq_relationship": "cls.seq_relationship"}
)


def pretraining(c: Any) -> Head:
    follows = to_labels(c, "features", 2)
    return PretrainingHead(**masked(c), pooler=pooler(c), seq_relationship=follows)


@family(
    FAMILIES,
    "bert",
    BERT,
    base_prefix="bert",
    spare=r"(bert\.)?pooler\.|cls\.|classifier\.|qa_outputs\.",
)
def bert(c: Any) -> Encoder:
    heads = HEADS | {"ForPreTraining": pretraining}
    head = asked_head(c, "Bert", heads, ["classifier_dropout"])
    return encoder(c, head, embed_types=types(c))


NOMIC = (
    bert_layers("nomic_bert")
    | PREDICTIONS
    | {
        "layers": "nomic_bert.layers",
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.k_proj": "self_attn.k_proj",
        "self_attn.v_proj": "self_attn.v_proj",
        "self_attn.o_proj": "self_attn.o_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
        "post_attention_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "head.transform.norm": "cls.predictions.transform.layer_norm",
        "head.hidden.dense": "nomic_bert.pooler.dense",
    }
)

OLDER_NOMIC = (
    WeightRenaming(r"encoder\.layers", "layers"),
    WeightRenaming("emb_ln", "embeddings.LayerNorm"),
    WeightRenaming(r"attn\.out_proj", "self_attn.o_proj"),
    WeightRenaming("fc11", "up_proj"),
    WeightRenaming("fc12", "gate_proj"),
    WeightRenaming("fc2", "down_proj"),
    WeightRenaming("norm1", "post_attention_layernorm"),
    WeightRenaming("norm2", "post_mlp_layernorm"),
    WeightConverter("attn.Wqkv", [f"self_attn.{x}_proj" for x in ("q", "k", "v")], [Chunk(dim=0)]),
)


OLDER_NOMIC_KEYS: dict[str, Any] = {
    "n_embd": lambda c: c.hidden_size,
    "n_head": lambda c: c.num_attention_heads,
    "n_inner": lambda c: c.intermediate_size,
    "n_layer": lambda c: c.num_hidden_layers,
    "layer_norm_epsilon": lambda c: c.layer_norm_eps,
    "rotary_emb_base": lambda c: c.rope_parameters["rope_theta"],
    "rotary_emb_fraction": lambda c: 1.0,
    "activation_function": lambda c: {"silu": "swiglu"}.get(c.hidden_act),
}
"""What the first files say in keys that the config class does not read -> what it has instead."""

NEVER = ("causal", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "qkv_proj_bias", "use_rms_norm")
"""Other models that such files could ask for."""


def check_older_keys(c: Any) -> None:
    """
    Raises:
        ConfigError: naming a key that asks for something else than what is built.
    """
    built = OLDER_NOMIC_KEYS | dict.fromkeys((*NEVER, "rotary_emb_interleaved"), lambda c: False)
    for key, ours in built.items():
        asked = c.get(key)
        if asked is not None and asked != ours(c):
            raise ConfigError(
                f"config.json says {key}={asked!r}, which Transformers 5 does not read; the model "
                f"would have {ours(c)!r}. Write it in today's keys."
            )


def nomic_block(c: Any, i: int) -> PostNormBlock:
    rate = float(c.hidden_dropout_prob)
    attn = both_ways(
        c,
        bias=False,
        rope=rotary(c),
        head_dim=head_dim(c),
        dropout=float(c.attention_probs_dropout_prob),
    )
    return PostNormBlock(
        self_attn=attn,
        mlp=gated_mlp(c.hidden_size, c.intermediate_size, c.hidden_act),
        post_attention_layernorm=norm(c),
        post_feedforward_layernorm=norm(c),
        attn_dropout=rate,
        mlp_dropout=rate,
    )


@family(
    FAMILIES,
    "nomic_bert",
    NOMIC,
    OLDER_NOMIC,
    base_prefix="nomic_bert",
    spare=r"(nomic_bert\.)?pooler\.|cls\.|classifier\.",
)
def nomic_bert(c: Any) -> Encoder:
    check_older_keys(c)
    heads = {
        "Model": lambda c: Bare(),
        "ForMaskedLM": masked_lm,
        "ForSequenceClassification": of_pooled,
        "ForTokenClassification": HEADS["ForTokenClassification"],
    }
    head = asked_head(c, "NomicBert", heads, ["classifier_dropout"])
    return encoder(c, head, nomic_block, embed_types=types(c), embed_positions=None)
