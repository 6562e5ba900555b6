"""How the keys of a config may vary: values that another model of the same family could have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from variant_changes import Change, Path
from variant_sizes import (
    EXPERTS,
    HEADS,
    LAYERS,
    UNCHANGED,
    WIDTHS,
    Config,
    first,
    rope_fits,
    turned,
)

Draw = Callable[[Random, Any, Config], Any]
Fits = Callable[[Any, Config], bool]

STAYS = re.compile(
    r"_.*|.*(dropout|pdrop|layerdrop|drop_path).*|.*(token_id|token_index|_tokens|_ids|_coef)"
    r"|initializer_.*|init_(std|device)|.*jitter.*|is_.*|.*label.*|output_.*|return_dict"
    r"|use_(cache|mambapy|mamba_kernels|associative_scan|weighted_layer_sum)|chunk_size_feed_forward"
    r"|architectures|(torch_)?dtype|model_type|transformers_version|pretraining_tp|problem_type"
    r"|max_.*|n_positions|num_nextn_predict_layers|add_cross_attention|summary_.*|dense_act_fn"
    r"|use_bidirectional_attention|image_seq_length|logit_scale_init_value|mask_.*|attn_impl"
    r"|stage_names|out_(features|indices)|time_step_(min|max|floor|scale|init_scheme)"
    r"|rescale_prenorm_residual|classifier_proj_size|median_filter_width|reshape_hidden_states"
    r"|attention_layers|apply_(layernorm|spec_augment)|layerscale_value|encoder_stride|decoder_vocab_size"
)
"""Keys of training, of tokens and of other heads, and those that nothing is computed with."""

DERIVED = {
    "pixtral": {"head_dim"},
    "deepseek_v2": {"head_dim", "qk_head_dim"},
    "deepseek_v3": {"head_dim", "qk_head_dim"},
}
"""Keys that a class makes of others, whatever it is given."""

ACTS = ("gelu", "silu", "relu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "tanh", "relu2")


def one_of(*values: Any) -> Draw:
    return lambda rng, old, config: rng.choice([v for v in values if v != old] or [old])


def heads_fit(heads: Any, config: Config) -> bool:
    """Heads of equal and even size; or of the one that the config says, which some classes let be
    only where they could be of equal size.
    """
    if "n_groups" in config:
        return state_fits(heads, config)
    width, told = first(config, WIDTHS), config.get("head_dim") or config.get("d_kv")
    return not width or (width % heads == 0 and bool(told or width // heads % 2 == 0))


def heads(rng: Random, old: Any, config: Config) -> Any:
    if "n_groups" in config:
        return fitted_state(rng, old, config)
    return rng.choice([n for n in (1, 2, 3, 4, 6) if heads_fit(n, config)] or [old])


def kv_fit(kv: Any, config: Config) -> bool:
    return kv is None or first(config, HEADS) % kv == 0


def kv_heads(rng: Random, old: Any, config: Config) -> Any:
    return rng.choice([n for n in (1, 2, 3, 6) if kv_fit(n, config)])


def groups_fit(groups: Any, config: Config) -> bool:
    return not groups or first(config, EXPERTS) % groups == 0


def groups(rng: Random, old: Any, config: Config) -> Any:
    return rng.choice([n for n in (1, 2, 3) if groups_fit(n, config)])


def per_layer(rng: Random, old: Any, config: Config) -> Any:
    """Kinds of layers in another order, and as many as there are layers."""
    known = {*old, "full_attention"} if "sliding_attention" in old else {*old}
    known = known or {0, 1}
    if not all(isinstance(kind, str | int) for kind in known):
        return UNCHANGED
    return [rng.choice(sorted(known)) for _ in range(first(config, LAYERS))]


def per_layer_fits(kinds: Any, config: Config) -> bool:
    return not isinstance(kinds, list) or len(kinds) == first(config, LAYERS)


def near_or_far(rng: Random, old: Any, config: Config) -> Any:
    return [[[rng.choice(["global", "local"]) for _ in range(first(config, LAYERS))], 1]]


def types_fit(types: Any, config: Config) -> bool:
    return sum(len(kinds) * times for kinds, times in types) == first(config, LAYERS)


def window(rng: Random, old: Any, config: Config) -> Any:
    """Tokens of a text, or pixels of a picture."""
    return rng.choice([8, 24, 32] if "fullatt_block_indexes" in config else [3, 5, 9])


def some_layers(rng: Random, old: Any, config: Config) -> Any:
    """Numbers of layers."""
    every = range(first(config, LAYERS))
    return sorted(rng.sample(every, rng.choice([1, len(every) - 1])))


def fitted_state(rng: Random, old: Any, config: Config) -> Any:
    """As many heads as make up the inner width of a Mamba 2 layer."""
    size = config["head_dim"] if "state_size" in config else config["mamba_d_head"]
    return expanded(config) // size if isinstance(size, int) else UNCHANGED


def expanded(config: Config) -> int:
    return int(config.get("expand", config.get("mamba_expand", 2)) * config["hidden_size"])


def state_fits(count: Any, config: Config) -> bool:
    size = config["head_dim"] if "state_size" in config else config["mamba_d_head"]
    return not isinstance(size, int) or count * size == expanded(config)


def shares(groups: Any, config: Config) -> bool:
    return first(config, ("mamba_n_heads", *HEADS)) % groups == 0


def shared(rng: Random, old: Any, config: Config) -> Any:
    return rng.choice([n for n in (1, 2, 3, 4) if shares(n, config)])


def always(value: Any, config: Config) -> bool:
    return True


RULES: list[tuple[str, Draw, Fits]] = [
    ("|".join(WIDTHS), one_of(24, 36, 48), always),
    ("head_dim|d_kv|mamba_d_head", one_of(8, 12, 16), always),
    ("(mamba_)?expand", one_of(1, 2, 3), always),
    ("mamba_n_heads", fitted_state, state_fits),
    ("|".join((*HEADS, "decoder_attention_heads")), heads, heads_fit),
    (r"num_(key_value|kv)_heads", kv_heads, kv_fit),
    (
        "|".join((*LAYERS, "num_decoder_layers", "encoder_layers", "decoder_layers")),
        one_of(3, 4),
        always,
    ),
    ("layer_types|mlp_layer_types|no_rope_layers", per_layer, per_layer_fits),
    ("mlp_only_layers|moe_layers|attn_layer_indices|fullatt_block_indexes", some_layers, always),
    ("attention_types", near_or_far, types_fit),
    ("rope_parameters", turned, rope_fits),
    (r".*vocab_size", one_of(131, 157), always),
    ("|".join(EXPERTS), one_of(6, 9, 12), always),
    ("num_experts_per_tok|moe_k|moe_topk", one_of(1, 2, 3), always),
    ("n_group", groups, groups_fit),
    ("topk_group", lambda rng, old, c: rng.choice(range(1, (c.get("n_group") or 1) + 1)), always),
    (
        r".*intermediate_size|.*ffn_dim|d_ff|hidden_dim|ffn_hidden_size|n_inner",
        one_of(20, 37, 52),
        always,
    ),
    (r".*eps(ilon)?", one_of(1e-6, 1e-4, 1e-2, 0.1), always),
    (
        r"feed_forward_proj",
        one_of("relu", "gated-gelu", "gated-silu", "gelu", "gated-relu"),
        always,
    ),
    (
        r"hidden_act|activation(_function)?|.*_activation|projector_hidden_act|pooler_act",
        one_of(*ACTS),
        always,
    ),
    (r"sliding_window|window_size|attention_chunk_size", window, always),
    ("spatial_merge_size", one_of(1, 2), always),
    ("local_attention", one_of(3, 4, 6), always),
    ("topk_method", one_of("greedy", "group_limited_greedy"), always),
    ("position_embedding_type", one_of("rope", None, "absolute"), always),
    ("classifier_pooling", one_of("cls", "mean"), always),
    ("vision_feature_select_strategy", one_of("default", "full"), always),
    ("vision_feature_layer", one_of(-1, -2, 1, [-1, -2], [0, -1]), always),
    ("q_lora_rank", one_of(None, 8, 20), always),
    ("kv_lora_rank", one_of(8, 20), always),
    (r"qk_(nope|rope)_head_dim|v_head_dim|linear_(key|value)_head_dim", one_of(4, 8, 12), always),
    ("rotary_dim", one_of(2, 4, 6), always),
    ("num_ln_in_parallel_attn", one_of(1, 2), always),
    ("relative_attention_num_buckets", one_of(10, 18, 33, 40), always),
    ("relative_attention_max_distance", one_of(21, 40), always),
    ("image_size", one_of(16, 24, 32), always),
    ("patch_size", one_of(4, 8), always),
    ("mm_tokens_per_image", one_of(1, 4, 16), always),
    (r"projection_(dim|size)|pooler_output_size|word_embed_proj_dim", one_of(20, 28), always),
    (r".*(conv_kernel|d_conv|L_cache|conv_kernel_dim)", one_of(2, 3, 5), always),
    (r"(mamba_)?n_groups", shared, shares),
    (r".*(state_size|d_state|dt_rank|step_rank)", one_of(3, 6), always),
    ("logits_scaling|softmax_scale|clip_qkv|logit_scale|.*softcapping", one_of(0.7, 1.7), always),
]
"""Which keys (the first pattern that is a whole key decides), what else they may be, and whether a
value still fits to those drawn before: one that does not is drawn, too.
"""

_RULES = [(re.compile(pattern), draw, fits) for pattern, draw, fits in RULES]


def plain(rng: Random, old: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([max(1, old - 1), old + 1, 2 * old])
    return old * rng.choice([0.5, 1.5]) if isinstance(old, float) and old else UNCHANGED


def draws(config: Mapping[str, Any]) -> dict[str, tuple[Draw, Fits]]:
    """How each key that may vary does, in the order in which they depend on each other."""
    free = [key for key in config if not STAYS.fullmatch(key) and not key.endswith("_config")]
    found: dict[str, tuple[Draw, Fits]] = {}
    for pattern, draw, fits in _RULES:
        here = [key for key in free if pattern.fullmatch(key) and key not in found]
        found |= dict.fromkeys(here, (draw, fits))
    rest = (lambda rng, old, config: plain(rng, old)), always
    return found | {key: rest for key in free if key not in found}


def parts(config: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Config]]:
    """A config and those inside it, each with its path."""
    derived = DERIVED.get(config.get("model_type", ""), ())
    yield above, {key: value for key, value in config.items() if key not in derived}
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            yield from parts(value, (*above, key))


def varied(config: Config, chosen: set[Path], rng: Random) -> list[Change]:
    """The chosen keys with other values, and whatever does not fit to these."""
    changes: list[Change] = []
    for above, now in parts(config):
        for key, (draw, fits) in draws(now).items():
            old = now[key]
            if (*above, key) not in chosen and fits(old, now):
                continue
            new = draw(rng, old, now)
            if new is not UNCHANGED and new != old:
                now[key] = new
                changes.append(((*above, key), new))
    return changes


EQUAL: list[tuple[Path, Path, str]] = [
    (("vision_config", "out_hidden_size"), ("text_config", "hidden_size"), "out_hidden_size"),
    (("vision_config", "hidden_size"), ("text_config", "hidden_size"), "embed_dim"),
    (("text_config", "projection_size"), ("vision_config", "hidden_size"), "vision_use_head"),
]
"""Widths that are those of another part, where the vision config has the last key."""


def joined(config: Config, changes: list[Change]) -> list[Change]:
    """The changes, and those that parts make in each other."""
    vision, found = config.get("vision_config") or {}, dict(changes)
    for (side, key), (other, width), sign in EQUAL:
        if sign in vision and key in config.get(side, {}):
            value = found.get((other, width), config[other][width])
            found.pop((side, key), None)
            found |= {} if value == config[side][key] else {(side, key): value}
    return list(found.items())


def variants(config: Config, count: int, rng: Random) -> list[list[Change]]:
    """Changes of `count` variants: each key that may vary does so in one of them at least."""
    paths = [(*above, key) for above, now in parts(config) for key in draws(now)]
    rng.shuffle(paths)
    chosen = [
        {p for j, p in enumerate(paths) if j % count == i or rng.random() < 0.1}
        for i in range(count)
    ]
    return [joined(config, varied(config, keys, rng)) for keys in chosen]
