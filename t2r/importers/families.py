"""The families of Hugging Face models: `FAMILIES` has an entry for each supported model_type, `REFUSED` says why others
are not supported.

In this file `c` is the content of a config.json, and `fields` are those of our ModelConfig.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from t2r.errors import InputError, raise_all
from t2r.importers.names import TensorRule, Transform, bias_to_heads, from_heads, to_heads, transposed
from t2r.model.config import AttentionSpec, ModelConfig

Fields = dict[str, Any]
ACTIVATIONS = {
    "silu": "swish", "swish": "swish", "relu": "relu", "gelu": "gelu_exact", "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu",
}  # fmt: skip


class Family(NamedTuple):
    """A model_type: its config as fields of ours, its rules for tensors without their `prefixes`, tensors to ignore.

    `defaults` are the library's values of keys that a config.json may leave out. A key that `fields` and `rules` do not
    read must have this value: see `check_keys`.
    """

    fields: Callable[[Fields], Fields]
    rules: Callable[[Fields], list[TensorRule]]
    prefixes: tuple[str, ...]
    ignore: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})
    unread: tuple[str, ...] = ()  # patterns of keys that the library's model does not read, whatever a config says


def activation(c: Fields, name: str) -> str:
    """Our name for the activation function in the field `name`."""
    if c[name] not in ACTIVATIONS:
        raise InputError(f"{name}={c[name]!r} is not supported: only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[c[name]]


# Llama and its relatives: rotary positions, RMS norms before each branch, gated feed-forwards.


def rope_fields(c: Fields) -> Fields:
    """Rotary positions, from old configs (rope_theta, rope_scaling) and new ones (rope_parameters)."""
    scaling = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    theta = scaling.get("rope_theta", c.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields: Fields = {"positions": "rotary", "rope_theta": theta}
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


def llama_fields(c: Fields) -> Fields:
    return rope_fields(c) | {
        "vocab_size": c["vocab_size"],
        "layers": c["num_hidden_layers"],
        "width": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "feedforward": c["intermediate_size"],
        "norm": "rms",
        "norm_eps": c["rms_norm_eps"],
        "activation": activation(c, "hidden_act"),
        "gated": True,
        "bias": False,
        "scale_embedding": False,
        "tied_output": c.get("tie_word_embeddings", False),
    }


def windows(window: int | None, kinds: list[str]) -> list[Fields]:
    """The attention specs of all layers: those of kind sliding_attention have the window, the others none (0)."""
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    raise_all("layer_types:", [f"{kind!r} is not supported" for kind in unknown])
    return [vars(AttentionSpec(window=(window or 0) if kind == "sliding_attention" else 0)) for kind in kinds]


def mistral_fields(c: Fields) -> Fields:
    """Llama's fields, with a sliding window in all layers."""
    return llama_fields(c) | {"attention": windows(c["sliding_window"], ["sliding_attention"] * c["num_hidden_layers"])}


def qwen2_fields(c: Fields) -> Fields:
    kinds = c.get("layer_types")
    first, window = c.get("max_window_layers"), c.get("sliding_window")
    window = window if c.get("use_sliding_window") else None
    if kinds is None:
        kinds = [
            "sliding_attention" if window is not None and i >= first else "full_attention"
            for i in range(c["num_hidden_layers"])
        ]
    return llama_fields(c) | {"bias": False, "projection_bias": True, "attention": windows(window, kinds)}


def qwen3_fields(c: Fields) -> Fields:
    return qwen2_fields(c) | {"bias": False, "projection_bias": False, "query_norm": True}


def uniform_bias_fields(c: Fields) -> Fields:
    """Llama's fields; attention and feed-forward must both have biases, or neither."""
    biases = [c.get(name, False) for name in ("attention_bias", "mlp_bias")]
    if biases[0] != biases[1]:
        raise InputError(
            f"attention_bias={biases[0]} and mlp_bias={biases[1]}: biases in only one of attention and feed-forward "
            "are not supported"
        )
    return llama_fields(c) | {"bias": biases[0]}


ATTENTION = [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")]
GATED = [("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")]


def llama_rules(c: Fields, *, norm=None, norms: dict[str, str] | None = None) -> list[TensorRule]:
    norm = norm or (lambda x, config: x)
    norms = norms or {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
    rules = [
        TensorRule("embedding.table", "embed_tokens.weight"),
        TensorRule("embedding.output", "lm_head.weight"),
        TensorRule("final_norm.scale", "norm.weight", norm),
    ]
    layer = "layers.{i}."
    rules += [
        TensorRule(f"blocks.{{i}}.{ours}.scale", f"{layer}{theirs}.weight", norm) for ours, theirs in norms.items()
    ]
    for ours, theirs in ATTENTION:
        rules.append(TensorRule(f"blocks.{{i}}.attention.{ours}.kernel", f"{layer}self_attn.{theirs}.weight", to_heads))
        rules.append(
            TensorRule(f"blocks.{{i}}.attention.{ours}.bias", f"{layer}self_attn.{theirs}.bias", bias_to_heads)
        )
    rules.append(TensorRule("blocks.{i}.attention.out.kernel", f"{layer}self_attn.o_proj.weight", from_heads))
    rules.append(TensorRule("blocks.{i}.attention.out.bias", f"{layer}self_attn.o_proj.bias"))
    for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        rules.append(TensorRule(f"blocks.{{i}}.attention.{ours}.scale", f"{layer}self_attn.{theirs}.weight", norm))
    for ours, theirs in GATED:
        rules.append(TensorRule(f"blocks.{{i}}.feedforward.{ours}.kernel", f"{layer}mlp.{theirs}.weight", transposed))
        rules.append(TensorRule(f"blocks.{{i}}.feedforward.{ours}.bias", f"{layer}mlp.{theirs}.bias"))
    return rules


# Gemma 3: norms before and after each branch and of queries and keys; most layers have a sliding window and
# their own rotary base.


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
    return llama_fields(base | {"hidden_act": c["hidden_activation"]}) | {
        "norm_placement": "both",
        "query_norm": True,
        "bias": False,
        "scale_embedding": True,
        "tied_output": c.get("tie_word_embeddings", True),
        "attention": specs,
    }


def gemma3_rules(c: Fields) -> list[TensorRule]:
    norms = {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "feedforward_norm": "pre_feedforward_layernorm",
        "feedforward_out_norm": "post_feedforward_layernorm",
    }
    # Gemma's norms multiply by 1 + w. Its queries are scaled by 1/√query_pre_attn_scalar instead of 1/√head_dim: the
    # ratio goes into the scale of the query norm.
    rules = llama_rules(c, norm=lambda x, config: 1 + x, norms=norms)
    scale = c.get("query_pre_attn_scalar") or c["head_dim"]

    def queries(x: np.ndarray, config: ModelConfig) -> np.ndarray:
        return (1 + x) * (config.head_dim / scale) ** 0.5

    return [
        rule._replace(transform=queries) if rule.ours.endswith("attention.query_norm.scale") else rule for rule in rules
    ]


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
    rules = [
        TensorRule("embedding.table", "wte.weight"),
        TensorRule("embedding.output", "lm_head.weight"),
        TensorRule("positions", "wpe.weight"),
    ]
    norms = [
        ("final_norm", "ln_f"),
        ("blocks.{i}.attention_norm", "h.{i}.ln_1"),
        ("blocks.{i}.feedforward_norm", "h.{i}.ln_2"),
    ]
    rules += layer_norms(norms)
    for which, ours in enumerate(("query", "key", "value")):
        rules.append(TensorRule(f"blocks.{{i}}.attention.{ours}.kernel", "h.{i}.attn.c_attn.weight", fused_part(which)))
        rules.append(TensorRule(f"blocks.{{i}}.attention.{ours}.bias", "h.{i}.attn.c_attn.bias", fused_part(which)))
    # (heads · size, width) → (heads, size, width)
    heads = lambda x, config: x.reshape(-1, config.head_dim, x.shape[-1])  # noqa: E731
    rules.append(TensorRule("blocks.{i}.attention.out.kernel", "h.{i}.attn.c_proj.weight", heads))
    rules.append(TensorRule("blocks.{i}.attention.out.bias", "h.{i}.attn.c_proj.bias"))
    for ours, theirs in (("up", "c_fc"), ("down", "c_proj")):
        rules.append(TensorRule(f"blocks.{{i}}.feedforward.{ours}.kernel", f"h.{{i}}.mlp.{theirs}.weight"))
        rules.append(TensorRule(f"blocks.{{i}}.feedforward.{ours}.bias", f"h.{{i}}.mlp.{theirs}.bias"))
    return rules


def layer_norms(names: list[tuple[str, str]]) -> list[TensorRule]:
    """The rules for the scale and bias of norms; `names` holds pairs of (our name, their name)."""
    return [
        TensorRule(f"{ours}.{mine}", f"{theirs}.{their}")
        for ours, theirs in names
        for mine, their in (("scale", "weight"), ("bias", "bias"))
    ]


# GPT-NeoX and Pythia: rotary positions on part of each head; attention and feed-forward in parallel.


def neox_fields(c: Fields) -> Fields:
    size = c["hidden_size"] // c["num_attention_heads"]
    rope = c.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", c.get("rotary_pct", 0.25))
    return rope_fields(c | {"rope_theta": c.get("rotary_emb_base", c.get("rope_theta", 10_000.0))}) | {
        "vocab_size": c["vocab_size"], "layers": c["num_hidden_layers"], "width": c["hidden_size"],
        "heads": c["num_attention_heads"], "feedforward": c["intermediate_size"], "rope_size": int(size * share),
        "norm_eps": c["layer_norm_eps"], "activation": activation(c, "hidden_act"), "scale_embedding": False,
        "parallel": c.get("use_parallel_residual", True), "tied_output": c.get("tie_word_embeddings", False),
    }  # fmt: skip


def fused_part_by_head(which: int) -> Transform:
    """Query (0), key (1) or value (2), fused head by head: (heads · 3 · size, width) → (width, heads, size)."""

    def transform(x: np.ndarray, config: ModelConfig) -> np.ndarray:
        part = x.reshape(config.heads, 3, config.head_dim, *x.shape[1:])[:, which]
        return np.moveaxis(part, -1, 0) if x.ndim == 2 else part

    return transform


def neox_rules(c: Fields) -> list[TensorRule]:
    layer = "layers.{i}."
    rules = [TensorRule("embedding.table", "embed_in.weight"), TensorRule("embedding.output", "embed_out.weight")]
    rules += layer_norms([
        ("final_norm", "final_layer_norm"), ("blocks.{i}.attention_norm", f"{layer}input_layernorm"),
        ("blocks.{i}.feedforward_norm", f"{layer}post_attention_layernorm"),
    ])  # fmt: skip
    for which, ours in enumerate(("query", "key", "value")):
        for part in ("kernel", "bias"):
            theirs = f"{layer}attention.query_key_value.{'weight' if part == 'kernel' else 'bias'}"
            rules.append(TensorRule(f"blocks.{{i}}.attention.{ours}.{part}", theirs, fused_part_by_head(which)))
    rules.append(TensorRule("blocks.{i}.attention.out.kernel", f"{layer}attention.dense.weight", from_heads))
    rules.append(TensorRule("blocks.{i}.attention.out.bias", f"{layer}attention.dense.bias"))
    for ours, theirs in (("up", "dense_h_to_4h"), ("down", "dense_4h_to_h")):
        rules.append(TensorRule(f"blocks.{{i}}.feedforward.{ours}.kernel", f"{layer}mlp.{theirs}.weight", transposed))
        rules.append(TensorRule(f"blocks.{{i}}.feedforward.{ours}.bias", f"{layer}mlp.{theirs}.bias"))
    return rules


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
        "final_norm": norm_first and not c.get("_remove_final_layer_norm", False), "bias": c.get("enable_bias", True),
        "activation": activation(c, "activation_function"), "scale_embedding": False,
        "tied_output": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def opt_rules(c: Fields) -> list[TensorRule]:
    layer = "layers.{i}."
    rules = [TensorRule("embedding.table", "embed_tokens.weight"), TensorRule("embedding.output", "lm_head.weight"),
            TensorRule("positions", "embed_positions.weight", lambda x, config: x[2:])]  # fmt: skip
    rules += layer_norms([
        ("final_norm", "final_layer_norm"), ("blocks.{i}.attention_norm", f"{layer}self_attn_layer_norm"),
        ("blocks.{i}.feedforward_norm", f"{layer}final_layer_norm"),
    ])  # fmt: skip
    return rules + attention_rules("attention", f"{layer}self_attn") + feedforward_rules(layer)


def attention_rules(ours: str, theirs: str, blocks: str = "blocks") -> list[TensorRule]:
    """The projections of attention, with the names of OPT, BART and Marian."""
    rules = []
    for mine, their in ATTENTION:
        rules.append(TensorRule(f"{blocks}.{{i}}.{ours}.{mine}.kernel", f"{theirs}.{their}.weight", to_heads))
        rules.append(TensorRule(f"{blocks}.{{i}}.{ours}.{mine}.bias", f"{theirs}.{their}.bias", bias_to_heads))
    rules.append(TensorRule(f"{blocks}.{{i}}.{ours}.out.kernel", f"{theirs}.out_proj.weight", from_heads))
    return [*rules, TensorRule(f"{blocks}.{{i}}.{ours}.out.bias", f"{theirs}.out_proj.bias")]


def feedforward_rules(layer: str, blocks: str = "blocks") -> list[TensorRule]:
    """The feed-forward matrices, with the names of OPT, BART and Marian."""
    rules = []
    for ours, theirs in (("up", "fc1"), ("down", "fc2")):
        rules.append(TensorRule(f"{blocks}.{{i}}.feedforward.{ours}.kernel", f"{layer}{theirs}.weight", transposed))
        rules.append(TensorRule(f"{blocks}.{{i}}.feedforward.{ours}.bias", f"{layer}{theirs}.bias"))
    return rules


# Encoder-decoder models: BART and mBART (learned positions), Marian (sinusoidal positions).


def seq2seq_fields(c: Fields) -> Fields:
    differences = [
        f"encoder_{name}={c[f'encoder_{name}']} differs from decoder_{name}={c[f'decoder_{name}']}"
        for name in ("attention_heads", "ffn_dim")
        if c[f"encoder_{name}"] != c[f"decoder_{name}"]
    ]
    raise_all("encoder and decoder must have equal sizes:", differences)
    tied, shared = c.get("tie_word_embeddings", True), c.get("share_encoder_decoder_embeddings", True)
    source, target = c["vocab_size"], c.get("decoder_vocab_size") or c["vocab_size"]
    target = source if shared else target
    return {
        "vocab_size": target, "source_vocab_size": source, "layers": c["decoder_layers"],
        "encoder_layers": c["encoder_layers"], "width": c["d_model"], "heads": c["decoder_attention_heads"],
        "feedforward": c["decoder_ffn_dim"], "activation": activation(c, "activation_function"),
        "shared_embedding": tied and shared, "tied_output": tied, "output_bias": True,
        "scale_embedding": c.get("scale_embedding", False), "norm_placement": "after", "final_norm": False,
    }  # fmt: skip


def marian_fields(c: Fields) -> Fields:
    if not c.get("static_position_embeddings", True):
        raise InputError("static_position_embeddings=False is not supported")
    return seq2seq_fields(c) | {"positions": "sinusoidal_open"}


def bart_fields(c: Fields) -> Fields:
    learned = {"positions": "learned", "max_positions": c["max_position_embeddings"], "embedding_norm": True}
    return seq2seq_fields(c) | learned


def mbart_fields(c: Fields) -> Fields:
    return bart_fields(c) | {"norm_placement": "before", "final_norm": True}


def seq2seq_rules(c: Fields) -> list[TensorRule]:
    shared = c.get("share_encoder_decoder_embeddings", True) and c.get("tie_word_embeddings", True)
    rules = [
        TensorRule("embedding.table", "shared.weight" if shared else "decoder.embed_tokens.weight"),
        TensorRule("encoder.embedding.table", "encoder.embed_tokens.weight"),
        TensorRule("embedding.output", "lm_head.weight"),
        TensorRule("embedding.bias", "final_logits_bias", lambda x, config: x[0]),
    ]
    return rules + stack_rules()


def stack_rules() -> list[TensorRule]:
    """Encoder and decoder without their embeddings, with the names of fairseq, BART and Marian."""
    rules = []
    for ours, theirs, blocks in (("", "decoder.", "blocks"), ("encoder.", "encoder.", "encoder.blocks")):
        layer = f"{theirs}layers.{{i}}."
        rules.append(TensorRule(f"{ours}positions", f"{theirs}embed_positions.weight", lambda x, config: x[2:]))
        rules += layer_norms([
            (f"{ours}embedding_norm", f"{theirs}layernorm_embedding"), (f"{ours}final_norm", f"{theirs}layer_norm"),
            (f"{blocks}.{{i}}.attention_norm", f"{layer}self_attn_layer_norm"),
            (f"{blocks}.{{i}}.cross_norm", f"{layer}encoder_attn_layer_norm"),
            (f"{blocks}.{{i}}.feedforward_norm", f"{layer}final_layer_norm"),
        ])  # fmt: skip
        rules += attention_rules("attention", f"{layer}self_attn", blocks)
        rules += attention_rules("cross", f"{layer}encoder_attn", blocks)
        rules += feedforward_rules(layer, blocks)
    return rules


_TIED = (r"(encoder|decoder)\.embed_tokens\.weight", r"shared\.weight", r"lm_head\.weight")  # copies of tied weights
_SINUSOIDS = (r"(encoder|decoder)\.embed_positions\.weight",)

_RMS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_MISTRAL = _RMS | {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = _RMS | {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_GEMMA3 = _RMS | {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attention_bias": False, "final_logit_softcapping": None,
    "attn_logit_softcapping": None, "use_bidirectional_attention": False, "hidden_act": None,
    "_sliding_window_pattern": 6,
}  # fmt: skip
_GPT2 = {
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "n_inner": None, "scale_attn_weights": True,
    "add_cross_attention": False,
}  # fmt: skip
_NEOX = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True}
_OPT = {"activation_function": "relu", "layer_norm_elementwise_affine": True}
_SEQ2SEQ = {"activation_function": "gelu"}
_ROPE = (r".*rotary_emb\.inv_freq",)

FAMILIES = {
    # transformers' Llama and Mistral read neither of the keys that they do not have.
    "llama": Family(uniform_bias_fields, llama_rules, ("model.",), _ROPE, _RMS, (r"sliding_window|layer_types",)),
    "mistral": Family(mistral_fields, llama_rules, ("model.",), _ROPE, _MISTRAL, (r"layer_types",)),
    "qwen2": Family(qwen2_fields, llama_rules, ("model.",), (), _QWEN),
    "qwen3": Family(qwen3_fields, llama_rules, ("model.",), (), _QWEN | {"head_dim": 128}),
    "gemma3_text": Family(gemma3_fields, gemma3_rules, ("model.",), (), _GEMMA3),
    "gpt2": Family(gpt2_fields, gpt2_rules, ("transformer.",), (r"h\.\d+\.attn\.(masked_)?bias",), _GPT2),
    "gpt_neox": Family(neox_fields, neox_rules, ("gpt_neox.",), (r".*attention\.(masked_)?bias", *_ROPE), _NEOX),
    "opt": Family(opt_fields, opt_rules, ("model.decoder.", "decoder."), (), _OPT),
    "marian": Family(marian_fields, seq2seq_rules, ("model.",), _TIED + _SINUSOIDS, _SEQ2SEQ),
    "bart": Family(bart_fields, seq2seq_rules, ("model.",), _TIED, _SEQ2SEQ),
    "mbart": Family(mbart_fields, seq2seq_rules, ("model.",), _TIED, _SEQ2SEQ),
}

_RELATIVE = "it adds relative position biases to the attention logits, which no feature map of linear attention has"
REFUSED = {
    "t5": _RELATIVE, "mt5": _RELATIVE, "umt5": _RELATIVE, "longt5": _RELATIVE,
    "bloom": "it adds ALiBi biases to the attention logits, which no feature map of linear attention has",
    "mpt": "it adds ALiBi biases to the attention logits, which no feature map of linear attention has",
    "gemma2": "it caps attention logits by tanh, which no feature map of linear attention has",
    "mixtral": "its feed-forwards are mixtures of experts", "qwen2_moe": "its feed-forwards are mixtures of experts",
    "mamba": "it has no attention to convert", "rwkv": "it has no attention to convert",
}  # fmt: skip
