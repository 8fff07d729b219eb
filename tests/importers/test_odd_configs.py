"""Configs and directories that differ from the usual: imported as transformers loads them, or refused by name."""

import functools
import importlib.util
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from t2r.errors import InputError
from t2r.importers import hugging_face, tokenizers
from t2r.importers.families import FAMILIES
from t2r.importers.hugging_face import HARMLESS, TrackedConfig
from t2r.importers.source import read_source
from t2r.model.config import from_dict
from t2r.model.embedding import sinusoids
from t2r.model.parameters import abstract_model, arrays_of, parameter_count, with_arrays
from t2r.model.transformer import check_length
from tests.conftest import PROSE, error, slow_but
from tests.importers.make_references import CASES, FOLDER
from tests.importers.released_configs import CONFIGS

live = pytest.mark.skipif(
    not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")),
    reason="transformers and torch are not installed",
)


def changed(tmp_path, name, tensors=None, **fields):
    """A copy of a reference model with other config fields (None as text "DROP": without it) and tensors."""
    folder = shutil.copytree(FOLDER / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value != "DROP"}
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        stored = load_file(folder / "model.safetensors")
        added = tensors(stored)
        save_file({**stored, **added}, folder / "model.safetensors")
    return folder


def logits_here(folder, name):
    config, arrays, _ = hugging_face.load_checkpoint(folder)
    model = with_arrays(abstract_model(config), {key: jnp.asarray(value) for key, value in arrays.items()})
    ids = jnp.arange(3, 27)[None] % config.vocab_size
    if config.encoder_layers:
        states = model.source_states(ids, jnp.ones(ids.shape, bool))
        return np.asarray(model.embedding.logits(model(ids[:, ::-1], source=states)[0]))
    return np.asarray(model.embedding.logits(model(ids)[0]))


def logits_there(folder, name):
    import torch
    import transformers

    # By a model's type, transformers finds its class; with layer_types, a Mistral is a Ministral.
    own = "layer_types" in json.loads((folder / "config.json").read_text()) and name == "mistral"
    model = getattr(transformers, "AutoModelForCausalLM" if own else CASES[name][0]).from_pretrained(folder).eval()
    ids = torch.tensor(np.arange(3, 27)[None] % 61)
    given = (
        dict(input_ids=ids, decoder_input_ids=ids.flip(1)) if model.config.is_encoder_decoder else dict(input_ids=ids)
    )
    with torch.no_grad():
        return model(**given).logits.float().numpy()


def separate(stored):
    """Three tables where the library ties one: of source, target and output."""
    rng = np.random.default_rng(0)
    shape = stored["model.shared.weight"].shape
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return {name: rng.standard_normal(shape, np.float32) for name in names}


def other_head(stored):
    name = next(key for key in stored if key.endswith(("embed_tokens.weight", "wte.weight")))
    return {"lm_head.weight": np.random.default_rng(0).standard_normal(stored[name].shape, np.float32)}


def attention_biases(stored):
    """A bias for each projection of attention."""
    rng = np.random.default_rng(0)
    weights = {name: array for name, array in stored.items() if "self_attn" in name and name.endswith("proj.weight")}
    return {
        name.replace("weight", "bias"): rng.standard_normal(len(array), np.float32) for name, array in weights.items()
    }


def one_norm(stored):
    """One norm for both branches, instead of two."""
    norms = {name.replace("ln_attn", "input_layernorm"): stored[name] for name in stored if "ln_attn" in name}
    for name in [name for name in stored if "ln_attn" in name or "ln_mlp" in name]:
        del stored[name]
    return norms


LONGROPE = dict(rope_type="longrope", rope_theta=10_000.0, short_factor=[1.0, 1.5, 2.0], long_factor=[3.0, 4.0, 5.0])
LONGROPE |= dict(partial_rotary_factor=0.75)


ODD = [
    ("bart", separate, dict(tie_word_embeddings=False)),
    ("mbart", separate, dict(tie_word_embeddings=False)),
    ("marian", separate, dict(tie_word_embeddings=False)),
    ("llama", None, dict(sliding_window=4)),
    ("llama", None, dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4)),
    ("mistral", None, dict(sliding_window="DROP")),
    ("mistral", None, dict(sliding_window=None)),
    ("mistral", None, dict(sliding_window=3, layer_types=["full_attention", "sliding_attention"])),
    ("llama3", other_head, {}),
    ("gpt2", other_head, {}),
    ("qwen3", None, dict(head_dim=8, sliding_window=4)),
]
MORE_ODD = [
    ("llama", attention_biases, dict(attention_bias=True)),
    ("phi3", None, dict(sliding_window="DROP")),
    ("phi3_long", None, dict(rope_parameters=LONGROPE | dict(factor=3.0))),
    ("phi3_long", None, dict(rope_parameters=LONGROPE | dict(attention_factor=0.7))),
    ("phi3_long", None, dict(rope_parameters="DROP", rope_scaling=LONGROPE, partial_rotary_factor=0.75)),
    ("smollm3", None, dict(no_rope_layers=[0, 1], layer_types="DROP", use_sliding_window=True, sliding_window=4)),
    ("smollm3", None, dict(no_rope_layers="DROP", layer_types="DROP", no_rope_layer_interval=1)),
    ("gemma", None, dict(hidden_act="gelu", hidden_activation=None)),
    ("gemma", attention_biases, dict(attention_bias=True)),
    ("granite", attention_biases, dict(attention_bias=True)),
    ("granite", other_head, {}),
    ("stablelm", None, dict(rope_parameters="DROP", partial_rotary_factor=1.0, rope_theta=500)),
    ("stablelm_parallel", None, dict(rope_parameters="DROP")),
    ("falcon", None, dict(num_kv_heads="DROP", ffn_hidden_size="DROP", rope_parameters="DROP")),
    ("falcon_new", one_norm, dict(num_ln_in_parallel_attn=1)),
    ("gptj", None, dict(rotary_dim=8)),
    ("pegasus", separate, dict(tie_word_embeddings=False)),
    ("m2m100", separate, dict(tie_word_embeddings=False)),
    ("m2m100", None, dict(scale_embedding=False)),
    ("llama", None, dict(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})),  # beside rope_parameters
    ("gemma", None, dict(hidden_act="gelu", hidden_activation="relu")),
    ("bart", None, dict(static_position_embeddings=False, do_blenderbot_90_layernorm=False)),
    ("opt", None, dict(_remove_final_layer_norm=False)),
]


@live
@pytest.mark.parametrize("name, tensors, fields", slow_but(ODD + MORE_ODD, *ODD))
def test_odd_models_equal_the_original(tmp_path, name, tensors, fields):
    folder = changed(tmp_path, name, tensors, **fields)
    assert error(logits_here(folder, name), logits_there(folder, name)) < 1e-5


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("gemma3", dict(attention_bias=True), "attention_bias=True is not supported"),
        ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported"),
        ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights=False is not supported"),
        ("qwen3", dict(attention_bias=True), "attention_bias=True is not supported"),
        ("gpt_neox", dict(attention_bias=False), "attention_bias=False is not supported"),
        ("opt", dict(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine=False is not supported"),
        ("llama", dict(quantization_config={"bits": 4}), "quantization_config"),
        ("llama", dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5 is not supported"),
        ("phi3", dict(lm_head_bias=True), "lm_head_bias=True is not supported"),
        ("phi3", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope_type='dynamic' is not supported"),
        ("smollm3", dict(layer_types=["sliding_attention"] * 2), "use_sliding_window=False and sliding_window=None"),
        ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("stablelm", dict(qk_layernorm=True), "qk_layernorm=True is not supported"),
        ("gptj", dict(rotary_dim=None), "rotary_dim=None is not supported"),
        ("gptj", dict(scale_attn_weights=False), "scale_attn_weights=False is not supported"),
        ("falcon", dict(alibi=True), "alibi=True is not supported: biases are added to the attention logits"),
        ("falcon_new", dict(parallel_attn=False), "parallel_attn=False .* do not go together"),
        ("falcon", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn=2 do not go together"),
        ("pegasus", dict(static_position_embeddings=False), "static_position_embeddings=False is not supported"),
        ("m2m100", dict(decoder_start_token_id=1), "decoder_start_token_id=1 is the padding token"),
        ("m2m100", dict(num_hidden_layers=24), "num_hidden_layers=24 differs from encoder_layers"),
        ("bart", dict(static_position_embeddings=True), "static_position_embeddings=True is not supported"),
        ("llama", dict(rope_parameters="x"), "'x' is not an object"),
        ("llama", dict(model_type=["llama"]), "is not the name of a family"),
        ("llama", dict(rope_parameters={"rope_theta": -5.0}), "rope_theta=-5.0 must be above 0"),
        ("llama", dict(rms_norm_eps=-1.0), "norm_eps=-1.0 must be above 0"),
        ("llama", dict(rope_parameters={"rope_type": "linear", "factor": 0.0}), "rope_factor=0.0 must be above 0"),
        ("llama", dict(some_new_thing=3), "some_new_thing=3 is unknown"),
        (
            "gemma3",
            dict(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
            "rope_type='linear' is not supported in sliding_attention layers",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path, name, fields, message):
    with pytest.raises(InputError, match=message):
        hugging_face.load_checkpoint(changed(tmp_path, name, **fields))


@pytest.mark.parametrize("name", ["pegasus", "marian"])
def test_stored_positions_are_sinusoids_or_refused(tmp_path, name):
    config, _, _ = hugging_face.load_checkpoint(FOLDER / name)
    table = np.asarray(sinusoids(jnp.arange(40)[None], config.width, is_open=True)[0])
    rounded = np.asarray(jnp.asarray(table, jnp.bfloat16), np.float32)
    for stored in (table, rounded):
        folder = changed(
            tmp_path / f"{id(stored)}", name, lambda _, x=stored: {"model.decoder.embed_positions.weight": x}
        )
        hugging_face.load_checkpoint(folder)
    folder = changed(tmp_path, name, lambda _: {"model.decoder.embed_positions.weight": table + 0.1})
    with pytest.raises(InputError, match=r"decoder.embed_positions.weight is not the table of sinusoids"):
        hugging_face.load_checkpoint(folder)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json is damaged"):
        tokenizers.hub(tmp_path, {})


@pytest.mark.slow
def test_a_model_saved_without_its_output_layer_has_no_bias_of_logits(tmp_path):
    """BartModel alone: no prefix, no final_logits_bias, no lm_head. As in transformers, the bias is then zero."""
    folder = changed(tmp_path, "bart")
    stored = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): array for name, array in stored.items() if name.startswith("model.")}
    save_file(bare, folder / "model.safetensors")
    bias = stored["final_logits_bias"]
    assert np.abs(bias).max() > 0.1
    assert error(logits_here(folder, "bart") + bias, logits_here(FOLDER / "bart", "bart")) < 1e-6


def test_weights_that_are_not_finite_are_refused(tmp_path):
    def damaged(stored):
        name = "model.layers.0.mlp.up_proj.weight"
        return {name: np.full_like(stored[name], np.nan)}

    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight has values that are NaN or infinite"):
        hugging_face.load_checkpoint(changed(tmp_path, "llama", damaged))


def test_of_a_single_file_and_an_index_the_file_counts(tmp_path):
    folder = changed(tmp_path, "llama")
    shutil.copy(folder / "model.safetensors", folder / "part.safetensors")
    stored = load_file(folder / "model.safetensors")
    save_file({name: array * 2 for name, array in stored.items()}, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert error(logits_here(folder, "llama"), logits_here(FOLDER / "llama", "llama")) == 0


def released(name):
    """Our config of a released model."""
    content = CONFIGS[name][0]
    family = FAMILIES[content["model_type"]]
    config = TrackedConfig({**family.defaults, **content})
    fields = family.fields(config)
    family.rules(config)
    hugging_face.check_keys(name, config, family)
    return from_dict(fields)


def test_the_configs_of_released_models_are_accepted():
    configs = {name: released(name) for name in CONFIGS}
    long, short = configs["phi-3-mini-128k"], configs["phi-3-mini-4k"]
    assert long == configs["phi-3-mini-128k, first"] and long.max_positions == 4096 and short.max_positions == 0
    assert long.rope_gain == pytest.approx((1 + 5 / 12) ** 0.5), "log 32 over log 4096"
    with pytest.raises(InputError, match="4097 tokens are too many for this model's rotary positions"):
        check_length(long, 4097)
    assert {spec.window for spec in short.attention} == {2047}
    assert configs["phi-4-mini"].rope_size == 96
    assert [layer for layer, spec in enumerate(configs["smollm3-3b"].attention) if not spec.rotary] == [
        *range(3, 36, 4)
    ]
    assert (configs["gemma-2b"].activation, configs["gemma-2b"].kv_heads) == ("gelu", 1)
    assert configs["falcon-40b"].kv_heads == 8 and configs["falcon-7b"].kv_heads == 1
    assert configs["nllb-200-distilled-600M"].position_offset == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, parameters, _) in CONFIGS.items() if parameters])
def test_released_models_have_as_many_parameters(name):
    config, (_, parameters, ours) = released(name), CONFIGS[name]

    def count(layers, encoder_layers):
        sizes = {"layers": layers, "attention": config.attention[:layers], "encoder_layers": encoder_layers}
        sizes |= {"cross_attention": config.cross_attention[:layers]} if encoder_layers else {}
        return parameter_count(arrays_of(abstract_model(config.replace(**sizes))))

    encoder = min(config.encoder_layers, 1)
    total = count(1, encoder) + (config.layers - 1) * (count(2, encoder) - count(1, encoder))
    if encoder:
        total += (config.encoder_layers - 1) * (count(1, 2) - count(1, 1))
    assert total == parameters + ours


@live
def test_every_key_of_every_family_is_accounted_for():
    """Each key of the library's own config class is read, known to change nothing, or has its default stated."""
    import transformers

    for name, (_, kind, fields) in CASES.items():
        theirs = getattr(transformers, kind)(**fields)
        family = FAMILIES[theirs.model_type]
        config = TrackedConfig({**family.defaults, **theirs.to_dict()})
        family.fields(config), family.rules(config)
        library = getattr(transformers, kind)().to_dict()
        for key in theirs.to_dict().keys() - config.read:
            harmless = HARMLESS.fullmatch(key) or any(map(functools.partial(_matches, key), family.unread))
            assert harmless or key in family.defaults, f"{name}: {key} is neither read nor known"
        stated = {key: value for key, value in family.defaults.items() if key in library}
        assert {key: library[key] for key in stated if key not in COMPUTED} == {
            key: value for key, value in stated.items() if key not in COMPUTED
        }, name


# Values that the library's class computes from others when it is made.
COMPUTED = ("layer_types", "sliding_window", "num_key_value_heads", "head_dim", "hidden_act", "no_rope_layers",
            "num_kv_heads", "ffn_hidden_size")  # fmt: skip


def _matches(key: str, pattern: str) -> bool:
    import re

    return bool(re.fullmatch(pattern, key))


@pytest.mark.parametrize("settings, begins", [({}, True), ({"add_bos_token": False}, False)])
def test_a_sentencepiece_model_alone_puts_bos_in_front(tmp_path, settings, begins):
    from t2r.data.tokenizer import SentencePiece, load_tokenizer, prompt_ids

    folder = changed(tmp_path, "llama")
    SentencePiece.train(PROSE, 300).save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_source(folder).tokenizer
    assert tokenizer.begins == begins
    assert (prompt_ids(tokenizer, [7]) == [1, 7]) == begins
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.begins, again.end, again.stop) == (tokenizer.begins, tokenizer.end, tokenizer.stop)
    assert tokenizers.find_tokenizer(folder, {"bos_token_id": 1}, translates=False).begins == begins
