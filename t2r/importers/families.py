"""The families of Hugging Face models: `FAMILIES` has an entry for each supported model_type, `REFUSED` says why others
are not supported. What they compute is in `language_models` and `translation_models`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from t2r.importers import language_models as lm
from t2r.importers import translation_models as mt
from t2r.importers.names import TensorRule
from t2r.importers.rules import Fields


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


_TIED = (r"(encoder|decoder)\.embed_tokens\.weight", r"shared\.weight", r"lm_head\.weight")  # copies of tied weights
_SINUSOIDS = (r"(encoder|decoder)\.embed_positions\.weights?",)

_RMS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_MISTRAL = _RMS | {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None}
_QWEN = _RMS | {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_PHI3 = _RMS | {
    "rms_norm_eps": 1e-5, "num_key_value_heads": None, "sliding_window": None, "original_max_position_embeddings": 4096,
    # The first version of Phi-3 and Phi-4-mini have these keys, which transformers does not read.
    "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
}  # fmt: skip
_OLMO2 = _RMS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None}
_GRANITE = _RMS | {"num_key_value_heads": None} | dict.fromkeys(
    ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
)  # fmt: skip
_SMOLLM3 = _RMS | {
    "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0, "use_sliding_window": False,
    "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
}  # fmt: skip
_GEMMA = _RMS | {
    "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "hidden_activation": None, "use_bidirectional_attention": None,
}  # fmt: skip
_GEMMA3 = _RMS | {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attention_bias": False, "final_logit_softcapping": None,
    "attn_logit_softcapping": None, "use_bidirectional_attention": False, "hidden_act": None,
    "_sliding_window_pattern": 6,
}  # fmt: skip
_STABLELM = {
    "layer_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "num_key_value_heads": 32,
    "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
_GPT2 = {
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "n_inner": None, "scale_attn_weights": True,
    "add_cross_attention": False,
}  # fmt: skip
_GPTJ = {
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "n_inner": None, "rotary_dim": 64,
    "tie_word_embeddings": False, "rotary": True, "scale_attn_weights": True,
}  # fmt: skip
_NEOX = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True}
_FALCON = {
    "layer_norm_epsilon": 1e-5, "activation": "gelu", "alibi": False, "bias": False, "multi_query": True,
    "parallel_attn": True, "new_decoder_architecture": False, "num_ln_in_parallel_attn": None, "num_kv_heads": None,
    "ffn_hidden_size": None, "tie_word_embeddings": True, "apply_residual_connection_post_layernorm": False,
}  # fmt: skip
_OPT = {"activation_function": "relu", "layer_norm_elementwise_affine": True}
_SEQ2SEQ = {"activation_function": "gelu"}
_BART = _SEQ2SEQ | {"static_position_embeddings": False, "do_blenderbot_90_layernorm": False}
_M2M100 = {
    "activation_function": "relu", "scale_embedding": True, "pad_token_id": 1, "decoder_start_token_id": 2,
    "static_position_embeddings": False,
}  # fmt: skip
_ROPE = (r".*rotary_emb\.inv_freq",)
_MASKS = (r".*\.(attn|attention|self_attention)\.(masked_)?bias",)

# Keys that the library's model does not read, though configs have them.
_LLAMA_UNREAD = (r"sliding_window|layer_types",)
_SEQ2SEQ_UNREAD = (r"hidden_size|num_attention_heads",)

FAMILIES = {
    "llama": Family(lm.llama_fields, lm.llama_rules, ("model.",), _ROPE, _RMS, _LLAMA_UNREAD),
    "mistral": Family(lm.mistral_fields, lm.llama_rules, ("model.",), _ROPE, _MISTRAL),
    "qwen2": Family(lm.qwen2_fields, lm.llama_rules, ("model.",), (), _QWEN),
    "qwen3": Family(lm.qwen3_fields, lm.llama_rules, ("model.",), (), _QWEN | {"head_dim": 128}),
    "phi3": Family(lm.phi3_fields, lm.phi3_rules, ("model.",), _ROPE, _PHI3),
    "olmo2": Family(lm.olmo2_fields, lm.olmo2_rules, ("model.",), _ROPE, _OLMO2),
    "granite": Family(lm.granite_fields, lm.granite_rules, ("model.",), _ROPE, _GRANITE),
    "smollm3": Family(lm.smollm3_fields, lm.llama_rules, ("model.",), _ROPE, _SMOLLM3, (r"max_window_layers",)),
    "gemma": Family(lm.gemma_fields, lm.gemma_rules, ("model.",), _ROPE, _GEMMA, (r"hidden_activation",)),
    "gemma3_text": Family(lm.gemma3_fields, lm.gemma3_rules, ("model.",), (), _GEMMA3),
    "stablelm": Family(lm.stablelm_fields, lm.stablelm_rules, ("model.",), _ROPE, _STABLELM),
    "gpt2": Family(lm.gpt2_fields, lm.gpt2_rules, ("transformer.",), _MASKS, _GPT2),
    "gptj": Family(lm.gptj_fields, lm.gptj_rules, ("transformer.",), _MASKS, _GPTJ, (r"n_positions",)),
    "gpt_neox": Family(lm.neox_fields, lm.neox_rules, ("gpt_neox.",), _MASKS + _ROPE, _NEOX),
    "falcon": Family(lm.falcon_fields, lm.falcon_rules, ("transformer.",), _ROPE, _FALCON),
    "opt": Family(lm.opt_fields, lm.opt_rules, ("model.decoder.", "decoder."), (), _OPT),
    "marian": Family(mt.marian_fields, mt.seq2seq_rules, ("model.",), _TIED + _SINUSOIDS, _SEQ2SEQ, _SEQ2SEQ_UNREAD),
    "pegasus": Family(mt.pegasus_fields, mt.seq2seq_rules, ("model.",), _TIED + _SINUSOIDS, _SEQ2SEQ, _SEQ2SEQ_UNREAD),
    "bart": Family(mt.bart_fields, mt.seq2seq_rules, ("model.",), _TIED, _BART, _SEQ2SEQ_UNREAD),
    "mbart": Family(mt.mbart_fields, mt.seq2seq_rules, ("model.",), _TIED, _BART, _SEQ2SEQ_UNREAD),
    "m2m_100": Family(mt.m2m100_fields, mt.seq2seq_rules, ("model.",), _TIED + _SINUSOIDS, _M2M100, _SEQ2SEQ_UNREAD),
}

_RELATIVE = "it adds relative position biases to the attention logits, which no feature map of linear attention has"
_ALIBI = "it adds ALiBi biases to the attention logits, which no feature map of linear attention has"
REFUSED = {
    "t5": _RELATIVE, "mt5": _RELATIVE, "umt5": _RELATIVE, "longt5": _RELATIVE,
    "bloom": _ALIBI, "mpt": _ALIBI,
    "gemma2": "it caps attention logits by tanh, which no feature map of linear attention has",
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe", "granitemoe", "nllb-moe"),
        "its feed-forwards are mixtures of experts",
    ),
    "mamba": "it has no attention to convert", "rwkv": "it has no attention to convert",
}  # fmt: skip
