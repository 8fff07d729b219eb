"""Writes tests/importers/references: tiny random models saved by the original library, and its outputs.

Needs torch and transformers, which the tests do not need:
    python -m tests.importers.make_references [NAME ...]
"""

import shutil
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "references"
SMALL = dict(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
PAIRED = dict(
    vocab_size=61, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
GPT2 = dict(vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
NEOX = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
FALCON = dict(
    vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OPT = dict(
    vocab_size=61, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip

# name → (model class, config class, fields)
CASES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(SMALL, rope_theta=500.0)),
    "llama_biases": ("LlamaForCausalLM", "LlamaConfig", dict(
        SMALL, attention_bias=True, mlp_bias=True, rope_scaling=dict(rope_type="linear", factor=2.0))),
    "llama3": ("LlamaForCausalLM", "LlamaConfig", dict(
        SMALL, head_dim=8, rope_scaling=LLAMA3, tie_word_embeddings=True)),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(SMALL, sliding_window=5)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(
        SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(SMALL, head_dim=8)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(
        SMALL, head_dim=8, query_pre_attn_scalar=12, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"])),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", dict(SMALL, sliding_window=5)),
    "phi3_long": ("Phi3ForCausalLM", "Phi3Config", dict(
        SMALL, num_attention_heads=2, partial_rotary_factor=0.75, original_max_position_embeddings=32,
        tie_word_embeddings=True,
        rope_scaling=dict(rope_type="longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[3.0, 4.0, 5.0]))),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", dict(SMALL, attention_bias=True)),
    "granite": ("GraniteForCausalLM", "GraniteConfig", dict(
        SMALL, embedding_multiplier=12, logits_scaling=8, residual_multiplier=0.22, attention_multiplier=0.4,
        tie_word_embeddings=True)),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", dict(SMALL, no_rope_layer_interval=2)),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", dict(SMALL, num_key_value_heads=1, head_dim=8, hidden_act="gelu")),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", dict(
        SMALL, use_qkv_bias=True, partial_rotary_factor=0.5)),
    "stablelm_parallel": ("StableLmForCausalLM", "StableLmConfig", dict(
        SMALL, num_attention_heads=2, use_parallel_residual=True)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", dict(GPT2, n_head=2, rotary_dim=4)),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "falcon_new": ("FalconForCausalLM", "FalconConfig", dict(
        FALCON, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=24)),
    "falcon_serial": ("FalconForCausalLM", "FalconConfig", dict(
        FALCON, multi_query=False, parallel_attn=False, bias=True)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", dict(NEOX, rotary_pct=0.5)),
    "gpt_neox_serial": ("GPTNeoXForCausalLM", "GPTNeoXConfig", dict(NEOX, rotary_pct=0.5, use_parallel_residual=False)),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "marian": ("MarianMTModel", "MarianConfig", dict(PAIRED, scale_embedding=True, activation_function="swish")),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", dict(PAIRED, scale_embedding=True)),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", dict(PAIRED, decoder_start_token_id=2)),
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIRED),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", dict(PAIRED, scale_embedding=True)),
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> None:
    """Writes one model directory, with reference.npz: ids, logits, and greedy generation from the first sequence."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model_class, config_class, fields = CASES[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields)).eval()
    with torch.no_grad():  # so that no norm scale is 1 and no bias 0
        for key, parameter in model.named_parameters():
            if not (name in ("marian", "pegasus") and "embed_positions" in key):  # sinusoids, which stay what they are
                parameter.add_(0.1 * torch.randn_like(parameter))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.add_(torch.randn_like(model.final_logits_bias))
    rng = np.random.default_rng(seed)
    arrays = {"input_ids": rng.integers(3, 61, (2, 12))}
    if model.config.is_encoder_decoder:
        arrays["decoder_input_ids"] = rng.integers(3, 61, (2, 9))
        arrays["attention_mask"] = np.where(np.arange(12) < [[12], [8]], 1, 0)
    with torch.no_grad():
        tensors = {key: torch.tensor(value) for key, value in arrays.items()}
        logits = model(**tensors).logits.float().numpy()
        greedy = model.generate(tensors["input_ids"][:1], max_new_tokens=8, do_sample=False, num_beams=1)[0].numpy()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "reference.npz", logits=logits, greedy=greedy, **arrays)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        shutil.rmtree(FOLDER / case, ignore_errors=True)
        make(case, FOLDER / case)
        print(case, file=sys.stderr)
