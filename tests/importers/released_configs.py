"""The config.json of released models, as far as it says something about the architecture or is odd.

name → (config, parameters of the released model, parameters that only ours has: a norm that two branches share, and the
bias of logits, which transformers does not count)
"""

_PHI3 = dict(
    model_type="phi3", architectures=["Phi3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=1,
    embd_pdrop=0.0, eos_token_id=32000, hidden_act="silu", hidden_size=3072, initializer_range=0.02,
    intermediate_size=8192, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pad_token_id=32000,
    original_max_position_embeddings=4096, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_theta=10000.0, vocab_size=32064,
    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.40.2", use_cache=True,
)  # fmt: skip
_SEQ2SEQ = dict(
    _num_labels=3, activation_dropout=0.0, attention_dropout=0.1, bos_token_id=0, classifier_dropout=0.0, d_model=1024,
    decoder_attention_heads=16, decoder_ffn_dim=4096, decoder_layers=12, dropout=0.1, encoder_attention_heads=16,
    encoder_ffn_dim=4096, encoder_layers=12, init_std=0.02, is_encoder_decoder=True, max_position_embeddings=1024,
    num_hidden_layers=12, scale_embedding=True, use_cache=True,
)  # fmt: skip
_STABLELM = dict(
    model_type="stablelm", architectures=["StableLmForCausalLM"], hidden_act="silu", initializer_range=0.02,
    layer_norm_eps=1e-05, max_position_embeddings=4096, num_attention_heads=32, num_key_value_heads=32,
    partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False, use_cache=True,
)  # fmt: skip

CONFIGS = {
    "phi-3-mini-4k": (_PHI3 | dict(
        max_position_embeddings=4096, rope_scaling=None, sliding_window=2047,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}), 3_821_079_552, 0),
    "phi-3-mini-128k": (_PHI3 | dict(
        max_position_embeddings=131072, sliding_window=262144,
        rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.05] * 48, type="longrope")), 3_821_079_552, 0),
    "phi-3-mini-128k, first": (_PHI3 | dict(
        max_position_embeddings=131072, sliding_window=262144,
        rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.05] * 48, type="su")), 3_821_079_552, 0),
    "phi-4-mini": (_PHI3 | dict(
        max_position_embeddings=131072, sliding_window=262144, num_attention_heads=24, num_key_value_heads=8,
        vocab_size=200064, tie_word_embeddings=True, partial_rotary_factor=0.75, full_attn_mod=1, interpolate_factor=1,
        lm_head_bias=False, mlp_bias=False, eos_token_id=199999, bos_token_id=199999, pad_token_id=199999,
        rope_scaling=dict(long_factor=[1.5] * 48, short_factor=[1.0] * 48, type="longrope")), 3_836_021_760, 0),
    "phi-4": (_PHI3 | dict(
        hidden_size=5120, intermediate_size=17920, num_attention_heads=40, num_key_value_heads=10, num_hidden_layers=40,
        max_position_embeddings=16384, original_max_position_embeddings=16384, rope_scaling=None, rope_theta=250000,
        sliding_window=None, vocab_size=100352), 14_659_507_200, 0),
    "olmo-2-7b": (dict(
        model_type="olmo2", architectures=["Olmo2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
        eos_token_id=100257, hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=11008,
        max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        pad_token_id=100277, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
        torch_dtype="float32", transformers_version="4.47.0.dev0", use_cache=False, vocab_size=100352),
        7_298_617_344, 0),
    "granite-3.1-2b": (dict(
        model_type="granite", architectures=["GraniteForCausalLM"], attention_bias=False, attention_dropout=0.1,
        attention_multiplier=0.015625, bos_token_id=0, embedding_multiplier=12.0, eos_token_id=0, hidden_act="silu",
        hidden_size=2048, initializer_range=0.02, intermediate_size=8192, logits_scaling=8.0,
        max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=40,
        num_key_value_heads=8, pad_token_id=0, residual_multiplier=0.22, rms_norm_eps=1e-05, rope_scaling=None,
        rope_theta=5000000.0, tie_word_embeddings=True, transformers_version="4.47.0.dev0", use_cache=True,
        vocab_size=49155), 2_533_531_648, 0),
    "smollm3-3b": (dict(
        model_type="smollm3", architectures=["SmolLM3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
        bos_token_id=128000, eos_token_id=128012, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
        intermediate_size=11008, layer_types=["full_attention"] * 36, max_position_embeddings=65536,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=4, pad_token_id=128004, pretraining_tp=2,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None, torch_dtype="bfloat16",
        transformers_version="4.54.0.dev0", use_cache=False, use_sliding_window=False, vocab_size=128256),
        3_075_098_624, 0),
    "gemma-2b": (dict(
        model_type="gemma", architectures=["GemmaForCausalLM"], attention_bias=False, attention_dropout=0.0,
        bos_token_id=2, eos_token_id=1, head_dim=256, hidden_act="gelu", hidden_activation=None, hidden_size=2048,
        initializer_range=0.02, intermediate_size=16384, max_position_embeddings=8192, num_attention_heads=8,
        num_hidden_layers=18, num_key_value_heads=1, pad_token_id=0, rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=10000.0, torch_dtype="bfloat16", use_cache=True, vocab_size=256000), 2_506_172_416, 0),
    "stablelm-3b-4e1t": (_STABLELM | dict(
        bos_token_id=0, eos_token_id=0, hidden_size=2560, intermediate_size=6912, num_hidden_layers=32,
        use_qkv_bias=False, vocab_size=50304), 2_795_443_200, 0),
    "stablelm-2-1.6b": (_STABLELM | dict(
        bos_token_id=100257, eos_token_id=100257, hidden_dropout=0.0, hidden_size=2048, intermediate_size=5632,
        num_hidden_layers=24, qk_layernorm=False, use_parallel_residual=False, use_qkv_bias=True, vocab_size=100352),
        1_644_515_328, 0),
    "falcon-7b": (dict(
        model_type="falcon", alibi=False, apply_residual_connection_post_layernorm=False, attention_dropout=0.0,
        architectures=["FalconForCausalLM"], auto_map={}, bias=False, bos_token_id=11, eos_token_id=11,
        hidden_dropout=0.0, hidden_size=4544, initializer_range=0.02, layer_norm_epsilon=1e-05, multi_query=True,
        new_decoder_architecture=False, num_attention_heads=71, num_hidden_layers=32, parallel_attn=True,
        torch_dtype="bfloat16", transformers_version="4.27.4", use_cache=True, vocab_size=65024),
        6_921_720_704, 32 * 2 * 4544),
    "falcon-40b": (dict(
        model_type="falcon", alibi=False, apply_residual_connection_post_layernorm=False, attention_dropout=0.0,
        bias=False, hidden_dropout=0.0, hidden_size=8192, initializer_range=0.02, layer_norm_epsilon=1e-05,
        multi_query=True, new_decoder_architecture=True, num_attention_heads=128, num_hidden_layers=60, num_kv_heads=8,
        parallel_attn=True, use_cache=True, vocab_size=65024), 41_303_293_952, 0),
    "gpt-j-6b": (dict(
        model_type="gptj", activation_function="gelu_new", architectures=["GPTJForCausalLM"], attn_pdrop=0.0,
        bos_token_id=50256, embd_pdrop=0.0, eos_token_id=50256, gradient_checkpointing=False, initializer_range=0.02,
        layer_norm_epsilon=1e-05, n_embd=4096, n_head=16, n_inner=None, n_layer=28, n_positions=2048, resid_pdrop=0.0,
        rotary=True, rotary_dim=64, scale_attn_weights=True, summary_activation=None, summary_first_dropout=0.1,
        summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True, tie_word_embeddings=False,
        task_specific_params={"text-generation": {"do_sample": True}}, tokenizer_class="GPT2Tokenizer", use_cache=True,
        transformers_version="4.18.0.dev0", vocab_size=50400), 6_050_882_784, 28 * 2 * 4096),
    "nllb-200-distilled-600M": (_SEQ2SEQ | dict(
        model_type="m2m_100", activation_function="relu", architectures=["M2M100ForConditionalGeneration"],
        decoder_layerdrop=0, decoder_start_token_id=2, encoder_layerdrop=0, eos_token_id=2, max_length=200,
        pad_token_id=1, tokenizer_class="NllbTokenizer", torch_dtype="float32", vocab_size=256206), 615_073_792, 0),
    "m2m100_418M": (_SEQ2SEQ | dict(
        model_type="m2m_100", activation_function="relu", decoder_layerdrop=0.05, decoder_start_token_id=2,
        early_stopping=True, encoder_layerdrop=0.05, eos_token_id=2, gradient_checkpointing=False, max_length=200,
        num_beams=5, pad_token_id=1, vocab_size=128112), 483_905_536, 0),
    "pegasus-xsum": (_SEQ2SEQ | dict(
        model_type="pegasus", activation_function="relu", add_bias_logits=False, add_final_layer_norm=True,
        decoder_layers=16, decoder_start_token_id=0, encoder_layers=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        eos_token_id=1, extra_pos_embeddings=1, force_bos_token_to_be_generated=False, forced_eos_token_id=1,
        id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, length_penalty=0.6, max_length=64,
        max_position_embeddings=512, normalize_before=True, normalize_embedding=False, num_beams=8,
        num_hidden_layers=16, pad_token_id=0, static_position_embeddings=True, vocab_size=96103), 568_699_904, 96_103),
    "bart-large-cnn": (_SEQ2SEQ | dict(
        model_type="bart", activation_function="gelu", add_bias_logits=False, add_final_layer_norm=False,
        classif_dropout=0.0, decoder_layerdrop=0.0, decoder_start_token_id=2, early_stopping=True,
        encoder_layerdrop=0.0, eos_token_id=2, force_bos_token_to_be_generated=True, forced_bos_token_id=0,
        forced_eos_token_id=2, gradient_checkpointing=False, length_penalty=2.0, max_length=142, min_length=56,
        no_repeat_ngram_size=3, normalize_before=False, num_beams=4, output_past=True, pad_token_id=1, prefix=" ",
        scale_embedding=False, vocab_size=50264), None, 0),
    "opus-mt-zh-en": (_SEQ2SEQ | dict(
        model_type="marian", activation_function="swish", add_bias_logits=False, add_final_layer_norm=False,
        bad_words_ids=[[65000]], classif_dropout=0.0, d_model=512, decoder_attention_heads=8, decoder_ffn_dim=2048,
        decoder_layerdrop=0.0, decoder_layers=6, decoder_start_token_id=65000, decoder_vocab_size=65001,
        encoder_attention_heads=8, encoder_ffn_dim=2048, encoder_layerdrop=0.0, encoder_layers=6, eos_token_id=0,
        extra_pos_embeddings=65001, forced_eos_token_id=0, max_length=512, max_position_embeddings=512,
        normalize_before=False, normalize_embedding=False, num_beams=6, num_hidden_layers=6, pad_token_id=65000,
        share_encoder_decoder_embeddings=True, static_position_embeddings=True, vocab_size=65001), None, 0),
}  # fmt: skip
