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
from t2r.model.parameters import abstract_model, with_arrays
from tests.conftest import PROSE, error
from tests.importers.make_references import CASES, FOLDER

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
        save_file({**stored, **tensors(stored)}, folder / "model.safetensors")
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

    model = getattr(transformers, CASES[name][0]).from_pretrained(folder).eval()
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


@live
@pytest.mark.parametrize(
    "name, tensors, fields",
    [
        ("bart", separate, dict(tie_word_embeddings=False)),
        ("mbart", separate, dict(tie_word_embeddings=False)),
        ("marian", separate, dict(tie_word_embeddings=False)),
        ("llama", None, dict(sliding_window=4)),
        ("llama", None, dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4)),
        ("mistral", None, dict(sliding_window="DROP")),
        ("mistral", None, dict(sliding_window=None)),
        ("llama3", other_head, {}),
        ("gpt2", other_head, {}),
        ("qwen3", None, dict(head_dim=8, sliding_window=4)),
    ],
)
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
