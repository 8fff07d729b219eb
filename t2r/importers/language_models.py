"""The families of Hugging Face language models: how a config.json becomes fields of ours, and tensors our arrays.

In this file `c` is the content of a config.json, and `fields` are those of our ModelConfig.
"""

import math

import numpy as np

from t2r.errors import InputError, raise_all
from t2r.importers.names import TensorRule, Transform, from_heads, to_heads
from t2r.importers.rules import (
    Fields,
    activation,
    attention_rules,
    feedforward_rules,
    linear,
    norm_rules,
    scaled,
    unchanged,
)
from t2r.model.config import AttentionSpec, ModelConfig

# Llama and its relatives: rotary positions, RMS norms before each branch, gated feed-forwards.


def rope_scaling(c: Fields) -> Fields:
    """The keys of an old config's rope_scaling, or of rope_parameters; with both, transformers reads the old one."""
    scaling = c.get("rope_scaling"), c.get("rope_parameters")
    wrong = [value for value in scaling if value is not None and not isinstance(value, dict)]
    raise_all("rotary positions:", [f"{value!r} is not an object of a config.json" for value in wrong])
    return scaling[0] or scaling[1] or {}


def rope_fields(c: Fields, *, share: float = 1.0, partial: bool = False) -> Fields:
    """Rotary positions, from old configs (rope_theta, rope_scaling) and new ones (rope_parameters).

    A family that can rotate a part of each head is `partial`; it rotates this `share` unless the config has another.
    """
    scaling = rope_scaling(c)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields: Fields = {"positions": "rotary", "rope_theta": scaling.get("rope_theta", c.get("rope_theta", 10_000.0))}
    share = scaling.get("partial_rotary_factor", c.get("partial_rotary_factor", share) if partial else 1.0)
    if share != 1:
        if not partial:
            raise InputError(f"partial_rotary_factor={share} is not supported in this family")
        fields["rope_size"] = int(head_dim(c) * share)
    if kind == "linear":
        fields |= {"rope_scaling": "linear", "rope_factor": scaling["factor"]}
    elif kind == "llama3":
        fields |= {
            "rope_scaling": "llama3", "rope_factor": scaling["factor"], "rope_low": scaling["low_freq_factor"],
            "rope_high": scaling["high_freq_factor"], "rope_original": scaling["original_max_position_embeddings"],
        }  # fmt: skip
    elif kind != "default":
        raise InputError(f"rope_type={kind!r} is not supported: only default, linear and llama3 are")
    return fields


def head_dim(c: Fields) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def sizes(c: Fields) -> Fields:
    return {
        "vocab_size": c["vocab_size"],
        "layers": c["num_hidden_layers"],
        "width": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": head_dim(c),
        "feedforward": c["intermediate_size"],
    }


def biases(c: Fields) -> Fields:
    """Biases of the attention and of the feed-forward, each if the config says so."""
    attention = c.get("attention_bias", False)
    return {"bias": c.get("mlp_bias", False), "projection_bias": attention, "out_bias": attention}


def plain_llama_fields(c: Fields) -> Fields:
    """Llama's fields, without biases and rotary positions."""
    return sizes(c) | {
        "norm": "rms",
        "norm_eps": c["rms_norm_eps"],
        "activation": activation(c, "hidden_act"),
        "gated": True,
        "bias": False,
        "scale_embedding": False,
        "tied_output": c.get("tie_word_embeddings", False),
    }


def llama_fields(c: Fields) -> Fields:
    return plain_llama_fields(c) | rope_fields(c) | biases(c)


def windows(window: int | None, kinds: list[str]) -> list[Fields]:
    """The attention specs of all layers: those of kind sliding_attention have the window, the others none (0)."""
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    raise_all("layer_types:", [f"{kind!r} is not supported" for kind in unknown])
    return [vars(AttentionSpec(window=(window or 0) if kind == "sliding_attention" else 0)) for kind in kinds]


def same_windows(c: Fields) -> Fields:
    """One sliding window in all layers."""
    return {"attention": windows(c["sliding_window"], ["sliding_attention"] * c["num_hidden_layers"])}


def mistral_fields(c: Fields) -> Fields:
    # With layer_types, transformers takes it for a Ministral, whose layers differ.
    attention = {"attention": windows(c["sliding_window"], c["layer_types"])} if c["layer_types"] else same_windows(c)
    return plain_llama_fields(c) | rope_fields(c) | attention


def qwen2_fields(c: Fields) -> Fields:
    kinds = c.get("layer_types")
    first, window = c.get("max_window_layers"), c.get("sliding_window")
    window = window if c.get("use_sliding_window") else None
    if kinds is None:
        kinds = [
            "sliding_attention" if window is not None and i >= first else "full_attention"
            for i in range(c["num_hidden_layers"])
        ]
    specs = {"projection_bias": True, "attention": windows(window, kinds)}
    return plain_llama_fields(c) | rope_fields(c) | specs


def qwen3_fields(c: Fields) -> Fields:
    return qwen2_fields(c) | {"projection_bias": False, "query_norm": True}


LLAMA_NORMS = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}


def llama_rules(c: Fields, *, norm: Transform = unchanged, norms: dict[str, str] = LLAMA_NORMS) -> list[TensorRule]:
    """The rules of Llama and its relatives; `norms` are a layer's, whose scales `norm` transforms."""
    ours, theirs = "blocks.{i}.", "layers.{i}."
    names = {f"{ours}{mine}": f"{theirs}{their}" for mine, their in norms.items()}
    names |= {"final_norm": "norm"}
    names |= {f"{ours}attention.{name}_norm": f"{theirs}self_attn.{name[0]}_norm" for name in ("query", "key")}
    rules = [TensorRule("embedding.table", "embed_tokens.weight"), TensorRule("embedding.output", "lm_head.weight")]
    rules += norm_rules(names, norm) + attention_rules(f"{ours}attention", f"{theirs}self_attn", "o_proj")
    for name in ("gate", "up", "down"):
        rules += linear(f"{ours}feedforward.{name}", f"{theirs}mlp.{name}_proj")
    return rules


# Phi-3: fused projections, and rotary frequencies that depend on the length.


def phi3_fields(c: Fields) -> Fields:
    scaling = rope_scaling(c)
    original = c["original_max_position_embeddings"]
    if scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su", "yarn"):  # in Phi-3 these are one thing
        return plain_llama_fields(c) | rope_fields(c, partial=True) | same_windows(c)
    unscaled = c | {"rope_scaling": None, "rope_parameters": scaling | {"rope_type": "default"}}
    rope = rope_fields(unscaled, partial=True) | longrope_fields(c, scaling, original)
    return plain_llama_fields(c) | rope | same_windows(c)


def longrope_fields(c: Fields, scaling: Fields, original: int) -> Fields:
    """LongRoPE: each frequency has its own factor, one in sequences of up to `original` tokens, another in longer ones.

    The state of a sequence cannot change its frequencies, so we have the first, and sequences up to that length.
    """
    factor = scaling.get("factor") or c["max_position_embeddings"] / original
    gain = scaling.get("attention_factor")
    if gain is None:
        gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope_scaling": "factors", "rope_factors": tuple(scaling["short_factor"]), "rope_gain": gain,
        "max_positions": original,
    }  # fmt: skip


def stacked_heads(which: int) -> Transform:
    """Query (0), key (1) or value (2) of a projection to all queries, then all keys, then all values."""

    def transform(x: np.ndarray, config: ModelConfig) -> np.ndarray:
        ends = np.cumsum([config.heads, config.kv_heads]) * config.head_dim
        return to_heads(np.split(x, ends)[which], config)

    return transform


def stacked_half(which: int) -> Transform:
    """The gate (0) or the first matrix (1) of a feed-forward that has them in one."""
    return lambda x, config: np.split(x, 2)[which].T


def phi3_rules(c: Fields) -> list[TensorRule]:
    rules = {rule.ours: rule for rule in llama_rules(c)}
    for which, name in enumerate(("query", "key", "value")):
        ours = f"blocks.{{i}}.attention.{name}.kernel"
        rules[ours] = TensorRule(ours, "layers.{i}.self_attn.qkv_proj.weight", stacked_heads(which))
    for which, name in enumerate(("gate", "up")):
        ours = f"blocks.{{i}}.feedforward.{name}.kernel"
        rules[ours] = TensorRule(ours, "layers.{i}.mlp.gate_up_proj.weight", stacked_half(which))
    return list(rules.values())


# OLMo 2: norms of each branch's output, and of the queries and keys of all heads together.


def olmo2_fields(c: Fields) -> Fields:
    return llama_fields(c) | {"norm_placement": "output", "query_norm": True, "query_norm_heads": True}


def olmo2_rules(c: Fields) -> list[TensorRule]:
    norms = {"attention_norm": "post_attention_layernorm", "feedforward_norm": "post_feedforward_layernorm"}
    rules = llama_rules(c, norms=norms)
    for name in ("query", "key"):
        theirs = f"layers.{{i}}.self_attn.{name[0]}_norm.weight"
        rules.append(TensorRule(f"blocks.{{i}}.attention.{name}_norm.scales", theirs))
    return rules


# Granite: Llama with four multipliers. Those of queries, branches and logits go into the weights before them.


def granite_fields(c: Fields) -> Fields:
    return llama_fields(c) | {"embedding_multiplier": float(c["embedding_multiplier"])}


def granite_rules(c: Fields) -> list[TensorRule]:
    residual, queries = c["residual_multiplier"], c["attention_multiplier"] * head_dim(c) ** 0.5
    factors = {"attention.query.kernel": queries, "attention.query.bias": queries}
    factors |= {f"{name}.{part}": residual for name in ("attention.out", "down") for part in ("kernel", "bias")}
    return scaled(llama_rules(c), factors | {"final_norm.scale": 1 / c["logits_scaling"]})


# SmolLM3: some layers have no positions.


def smollm3_fields(c: Fields) -> Fields:
    layers, every, window = c["num_hidden_layers"], c["no_rope_layer_interval"], c["sliding_window"]
    rotary = c["no_rope_layers"] or [(i + 1) % every != 0 for i in range(layers)]  # 1: the layer is rotary
    slides = c["use_sliding_window"] and window is not None
    kinds = c["layer_types"] or ["full_attention" if i or not slides else "sliding_attention" for i in rotary]
    if "sliding_attention" in kinds and not slides:
        raise InputError(
            f"layer_types has sliding_attention, but use_sliding_window={c['use_sliding_window']} and "
            f"sliding_window={window}: correct one of them"
        )
    specs = windows(window, kinds)
    for spec, has_positions in zip(specs, rotary):
        spec["rotary"] = bool(has_positions)
    return llama_fields(c) | {"attention": specs}


# Gemma: norms multiply by 1 + w, and embeddings are scaled. Gemma 3 has norms before and after each branch and of
# queries and keys; most of its layers have a sliding window and their own rotary base.


def one_plus(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    return 1 + x


def gemma_fields(c: Fields) -> Fields:
    # The first configs name the exact GELU, but the models were trained with its approximation.
    chosen = "gelu_pytorch_tanh" if c["hidden_act"] == "gelu" else c["hidden_act"]
    return llama_fields(c | {"hidden_act": chosen}) | {"scale_embedding": True}


def gemma_rules(c: Fields) -> list[TensorRule]:
    return llama_rules(c, norm=one_plus)


def gemma3_fields(c: Fields) -> Fields:
    rope = c.get("rope_parameters") or {}
    whole = rope.get("full_attention") or c.get("rope_scaling") or {}
    sliding = rope.get("sliding_attention") or {}
    if sliding.get("rope_type", "default") != "default":
        raise InputError(f"rope_type={sliding['rope_type']!r} is not supported in sliding_attention layers")
    local = sliding.get("rope_theta", c.get("rope_local_base_freq", 10_000.0))
    theta = whole.get("rope_theta", c.get("rope_theta", 1_000_000.0))
    layers = c["num_hidden_layers"]
    every = c.get("sliding_window_pattern", 6)
    kinds = c.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    specs = windows(c["sliding_window"], kinds)
    for spec in specs:
        spec["rope_theta"] = local if spec["window"] else None
    base = c | {"rope_parameters": {**whole, "rope_theta": theta}, "rope_scaling": None}
    return plain_llama_fields(c | {"hidden_act": c["hidden_activation"]}) | rope_fields(base) | {
        "norm_placement": "both",
        "query_norm": True,
        "scale_embedding": True,
        "tied_output": c.get("tie_word_embeddings", True),
        "attention": specs,
    }  # fmt: skip


def gemma3_rules(c: Fields) -> list[TensorRule]:
    norms = {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "feedforward_norm": "pre_feedforward_layernorm",
        "feedforward_out_norm": "post_feedforward_layernorm",
    }
    # Queries are scaled by 1/√query_pre_attn_scalar instead of 1/√head_dim: the ratio goes into their norm's scale.
    scale = c.get("query_pre_attn_scalar") or c["head_dim"]
    rules = llama_rules(c, norm=one_plus, norms=norms)
    return scaled(rules, {"attention.query_norm.scale": (c["head_dim"] / scale) ** 0.5})


# StableLM: Llama with layer norms, rotary positions on part of each head, and parallel layers with one norm.


def stablelm_fields(c: Fields) -> Fields:
    if c["qk_layernorm"]:
        raise InputError("qk_layernorm=True is not supported: layer norms of queries and keys, one for each head")
    fields = plain_llama_fields(c | {"rms_norm_eps": c["layer_norm_eps"]})
    return fields | rope_fields(c, share=0.25, partial=True) | {
        "norm": "layer", "projection_bias": c["use_qkv_bias"], "parallel": c["use_parallel_residual"],
    }  # fmt: skip


def stablelm_rules(c: Fields) -> list[TensorRule]:
    one_norm = dict.fromkeys(LLAMA_NORMS, "input_layernorm")
    return llama_rules(c, norms=one_norm if c["use_parallel_residual"] else LLAMA_NORMS)


# GPT-2: learned positions, one fused projection to queries, keys and values, matrices as (inputs, outputs).


def gpt2_fields(c: Fields) -> Fields:
    if c.get("scale_attn_by_inverse_layer_idx") or c.get("reorder_and_upcast_attn"):
        raise InputError("scale_attn_by_inverse_layer_idx and reorder_and_upcast_attn are not supported")
    return {
        "vocab_size": c["vocab_size"], "layers": c["n_layer"], "width": c["n_embd"], "heads": c["n_head"],
        "feedforward": c.get("n_inner") or 4 * c["n_embd"], "positions": "learned", "max_positions": c["n_positions"],
        "norm_eps": c["layer_norm_epsilon"], "activation": activation(c, "activation_function"),
        "scale_embedding": False, "tied_output": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def fused_part(which: int) -> Transform:
    """Query (0), key (1) or value (2): (inputs, 3 · heads · size) → (inputs, heads, size); a bias: (heads, size)."""

    def transform(x: np.ndarray, config: ModelConfig) -> np.ndarray:
        part = np.split(x, 3, -1)[which]
        return part.reshape(*part.shape[:-1], -1, config.head_dim)

    return transform


def gpt2_rules(c: Fields) -> list[TensorRule]:
    ours, theirs = "blocks.{i}.", "h.{i}."
    rules = [TensorRule("embedding.table", "wte.weight"), TensorRule("embedding.output", "lm_head.weight"),
             TensorRule("positions", "wpe.weight")]  # fmt: skip
    names = {"final_norm": "ln_f", f"{ours}attention_norm": f"{theirs}ln_1", f"{ours}feedforward_norm": f"{theirs}ln_2"}
    rules += norm_rules(names)
    for which, name in enumerate(("query", "key", "value")):
        rules += linear(f"{ours}attention.{name}", f"{theirs}attn.c_attn", fused_part(which), fused_part(which))
    # (heads · size, width) → (heads, size, width)
    heads = lambda x, config: x.reshape(-1, config.head_dim, x.shape[-1])  # noqa: E731
    rules += linear(f"{ours}attention.out", f"{theirs}attn.c_proj", heads)
    for mine, their in (("up", "c_fc"), ("down", "c_proj")):
        rules += linear(f"{ours}feedforward.{mine}", f"{theirs}mlp.{their}", unchanged)
    return rules


# GPT-J: rotary positions on part of each head; attention and feed-forward in parallel, with one norm.


def gptj_fields(c: Fields) -> Fields:
    if not c["rotary_dim"]:
        raise InputError(f"rotary_dim={c['rotary_dim']!r} is not supported: give the number of rotated dimensions")
    return {
        "vocab_size": c["vocab_size"], "layers": c["n_layer"], "width": c["n_embd"], "heads": c["n_head"],
        "feedforward": c["n_inner"] or 4 * c["n_embd"], "positions": "rotary", "rope_size": c["rotary_dim"],
        "norm_eps": c["layer_norm_epsilon"], "activation": activation(c, "activation_function"), "parallel": True,
        "projection_bias": False, "out_bias": False, "output_bias": True, "scale_embedding": False,
        "tied_output": c["tie_word_embeddings"],
    }  # fmt: skip


def pairs_apart(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """GPT-J rotates the pairs (x_2i, x_{2i+1}), we (x_i, x_{i + size/2}): the dimensions of each head are reordered."""
    rotated = np.arange(config.rope_size)
    order = np.concatenate([rotated[::2], rotated[1::2], np.arange(config.rope_size, config.head_dim)])
    return to_heads(x, config)[..., order]


def gptj_rules(c: Fields) -> list[TensorRule]:
    ours, theirs = "blocks.{i}.", "h.{i}."
    rules = [TensorRule("embedding.table", "wte.weight"), TensorRule("embedding.output", "lm_head.weight"),
             TensorRule("embedding.bias", "lm_head.bias")]  # fmt: skip
    norms = {"final_norm": "ln_f", f"{ours}attention_norm": f"{theirs}ln_1", f"{ours}feedforward_norm": f"{theirs}ln_1"}
    rules += norm_rules(norms) + attention_rules(f"{ours}attention", f"{theirs}attn")
    rules += feedforward_rules(f"{ours}feedforward", f"{theirs}mlp.", "fc_in", "fc_out")
    rotated = ("attention.query.kernel", "attention.key.kernel")
    return [rule._replace(transform=pairs_apart) if rule.ours.endswith(rotated) else rule for rule in rules]


# GPT-NeoX and Pythia: rotary positions on part of each head; attention and feed-forward in parallel. Falcon too, with
# fewer heads of keys and values.


def neox_fields(c: Fields) -> Fields:
    share, theta = c.get("rotary_pct", 0.25), c.get("rotary_emb_base", c.get("rope_theta", 10_000.0))
    return sizes(c) | rope_fields(c | {"rope_theta": theta}, share=share, partial=True) | {
        "norm_eps": c["layer_norm_eps"], "activation": activation(c, "hidden_act"), "scale_embedding": False,
        "parallel": c.get("use_parallel_residual", True), "tied_output": c.get("tie_word_embeddings", False),
    }  # fmt: skip


def grouped_part(which: slice) -> Transform:
    """Queries, keys or values fused group by group: each group has its queries, then the one key and value they share.

    (groups · (queries + 2) · size, width) → (width, heads, size); a bias: (heads, size).
    """

    def transform(x: np.ndarray, config: ModelConfig) -> np.ndarray:
        groups = x.reshape(config.kv_heads, -1, config.head_dim, *x.shape[1:])[:, which]
        heads = groups.reshape(-1, *groups.shape[2:])
        return np.moveaxis(heads, -1, 0) if x.ndim == 2 else heads

    return transform


def grouped_rules(c: Fields, layer: str, attention: str, norms: dict[str, str]) -> list[TensorRule]:
    """The rules of GPT-NeoX and Falcon without embeddings."""
    ours, rules = "blocks.{i}.", norm_rules(norms)
    for name, which in (("query", slice(-2)), ("key", slice(-2, -1)), ("value", slice(-1, None))):
        part = grouped_part(which)
        rules += linear(f"{ours}attention.{name}", f"{layer}{attention}.query_key_value", part, part)
    rules += linear(f"{ours}attention.out", f"{layer}{attention}.dense", from_heads)
    return rules + feedforward_rules(f"{ours}feedforward", f"{layer}mlp.", "dense_h_to_4h", "dense_4h_to_h")


def neox_rules(c: Fields) -> list[TensorRule]:
    layer = "layers.{i}."
    norms = {
        "final_norm": "final_layer_norm",
        "blocks.{i}.attention_norm": f"{layer}input_layernorm",
        "blocks.{i}.feedforward_norm": f"{layer}post_attention_layernorm",
    }
    tables = [TensorRule("embedding.table", "embed_in.weight"), TensorRule("embedding.output", "embed_out.weight")]
    return tables + grouped_rules(c, layer, "attention", norms)


def falcon_norms(c: Fields) -> tuple[str, str]:
    """The names of the norms before attention and feed-forward: one for both, or two."""
    new, parallel = c["new_decoder_architecture"], c["parallel_attn"]
    count = c["num_ln_in_parallel_attn"] or (2 if new else 1)
    if (new and not parallel) or (count == 2 and not new):
        raise InputError(
            f"new_decoder_architecture={new}, parallel_attn={parallel} and num_ln_in_parallel_attn={count} do not go "
            "together"
        )
    if count == 2:
        return "ln_attn", "ln_mlp"
    return "input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm"


def falcon_fields(c: Fields) -> Fields:
    if c["alibi"]:
        raise InputError(
            "alibi=True is not supported: biases are added to the attention logits, which no feature map of linear "
            "attention has"
        )
    falcon_norms(c)  # refuses what does not go together
    heads, multi_query = c["num_attention_heads"], c["multi_query"]
    groups = c["num_kv_heads"] or heads
    if not c["new_decoder_architecture"]:
        groups = 1 if multi_query else heads
    return rope_fields(c) | {
        "vocab_size": c["vocab_size"], "layers": c["num_hidden_layers"], "width": c["hidden_size"], "heads": heads,
        "kv_heads": groups, "feedforward": c["ffn_hidden_size"] or 4 * c["hidden_size"], "bias": c["bias"],
        "norm_eps": c["layer_norm_epsilon"], "activation": activation(c, "activation"), "scale_embedding": False,
        "parallel": c["parallel_attn"], "tied_output": c["tie_word_embeddings"],
    }  # fmt: skip


def falcon_rules(c: Fields) -> list[TensorRule]:
    attention, feedforward = falcon_norms(c)
    norms = {
        "final_norm": "ln_f",
        "blocks.{i}.attention_norm": f"h.{{i}}.{attention}",
        "blocks.{i}.feedforward_norm": f"h.{{i}}.{feedforward}",
    }
    tables = [TensorRule("embedding.table", "word_embeddings.weight"), TensorRule("embedding.output", "lm_head.weight")]
    return tables + grouped_rules(c, "h.{i}.", "self_attention", norms)


# OPT: learned positions, whose table begins with two unused entries.


def opt_fields(c: Fields) -> Fields:
    if c.get("word_embed_proj_dim", c["hidden_size"]) != c["hidden_size"]:
        raise InputError(
            f"word_embed_proj_dim={c['word_embed_proj_dim']} differs from hidden_size={c['hidden_size']}: "
            "projected embeddings are not supported"
        )
    norm_first = c.get("do_layer_norm_before", True)
    return {
        "vocab_size": c["vocab_size"], "layers": c["num_hidden_layers"], "width": c["hidden_size"],
        "heads": c["num_attention_heads"], "feedforward": c["ffn_dim"], "positions": "learned",
        "max_positions": c["max_position_embeddings"], "norm_placement": "before" if norm_first else "after",
        "final_norm": not c.get("_remove_final_layer_norm", False) and norm_first, "bias": c.get("enable_bias", True),
        "activation": activation(c, "activation_function"), "scale_embedding": False,
        "tied_output": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def opt_rules(c: Fields) -> list[TensorRule]:
    ours, theirs = "blocks.{i}.", "layers.{i}."
    rules = [TensorRule("embedding.table", "embed_tokens.weight"), TensorRule("embedding.output", "lm_head.weight"),
             TensorRule("positions", "embed_positions.weight", lambda x, config: x[2:])]  # fmt: skip
    norms = {
        "final_norm": "final_layer_norm",
        f"{ours}attention_norm": f"{theirs}self_attn_layer_norm",
        f"{ours}feedforward_norm": f"{theirs}final_layer_norm",
    }
    rules += norm_rules(norms) + attention_rules(f"{ours}attention", f"{theirs}self_attn")
    return rules + feedforward_rules(f"{ours}feedforward", theirs)
