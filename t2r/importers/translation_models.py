"""The families of Hugging Face encoder-decoders: how a config.json becomes fields of ours, and tensors our arrays.

In this file `c` is the content of a config.json, and `fields` are those of our ModelConfig.
"""

from t2r.errors import InputError, raise_all
from t2r.importers.names import TensorRule
from t2r.importers.rules import Fields, activation, attention_rules, feedforward_rules, norm_rules


def seq2seq_fields(c: Fields) -> Fields:
    """What all have in common; norms are after each branch, unless a family says otherwise."""
    differences = [
        f"encoder_{name}={c[f'encoder_{name}']} differs from decoder_{name}={c[f'decoder_{name}']}"
        for name in ("attention_heads", "ffn_dim")
        if c[f"encoder_{name}"] != c[f"decoder_{name}"]
    ]
    if c.get("num_hidden_layers", c["encoder_layers"]) != c["encoder_layers"]:  # transformers takes it as that number
        differences.append(
            f"num_hidden_layers={c['num_hidden_layers']} differs from encoder_layers={c['encoder_layers']}"
        )
    raise_all("sizes that must be equal:", differences)
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


NORM_FIRST = {"norm_placement": "before", "final_norm": True}


def mbart_fields(c: Fields) -> Fields:
    return bart_fields(c) | NORM_FIRST


def pegasus_fields(c: Fields) -> Fields:
    return marian_fields(c) | NORM_FIRST


def m2m100_fields(c: Fields) -> Fields:
    """M2M-100 and NLLB, as fairseq has them: positions count from 1 + the id of the padding token."""
    if c["decoder_start_token_id"] == c["pad_token_id"]:
        raise InputError(f"decoder_start_token_id={c['pad_token_id']} is the padding token, which has no position")
    return seq2seq_fields(c) | NORM_FIRST | {
        "positions": "sinusoidal", "position_offset": c["pad_token_id"] + 1, "output_bias": False,
    }  # fmt: skip


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
    for ours, theirs in (("", "decoder."), ("encoder.", "encoder.")):
        block, layer = f"{ours}blocks.{{i}}.", f"{theirs}layers.{{i}}."
        rules.append(TensorRule(f"{ours}positions", f"{theirs}embed_positions.weight", lambda x, config: x[2:]))
        rules += norm_rules({
            f"{ours}embedding_norm": f"{theirs}layernorm_embedding", f"{ours}final_norm": f"{theirs}layer_norm",
            f"{block}attention_norm": f"{layer}self_attn_layer_norm",
            f"{block}cross_norm": f"{layer}encoder_attn_layer_norm",
            f"{block}feedforward_norm": f"{layer}final_layer_norm",
        })  # fmt: skip
        rules += attention_rules(f"{block}attention", f"{layer}self_attn")
        rules += attention_rules(f"{block}cross", f"{layer}encoder_attn")
        rules += feedforward_rules(f"{block}feedforward", layer)
    return rules
