"""GGUF files give the model and the tokenizer of the Hugging Face directory that they were made from."""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file, save_file

from conftest import error
from t2r.errors import InputError
from t2r.evaluation.logits import logits_of
from t2r.importers import hugging_face
from t2r.importers.source import import_model, read_source
from t2r.model.parameters import abstract_model, with_arrays
from t2r.store import model_dir
from tests.importers.make_references import FOLDER

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

from tests.importers.gguf_files import TOKENIZER, read_folder, tensors_of, write  # noqa: E402

TEXT = "It's 1234 o'clock: 5 cafés, cafe\u0301s — naïve 日本語 🙂\n\n  two  spaces\tand \r\n more.   "

CORPUS = Path(__file__).read_text("utf-8")
SAMPLE = Path(__file__).with_name("gguf_files.py").read_text("utf-8")  # without special tokens


def same_model(path, folder):
    """Asserts that config and every array equal those of the Hugging Face directory; returns what was read."""
    imported = read_source(path)
    config, arrays, _ = hugging_face.load_checkpoint(folder)
    assert imported.config == config
    assert imported.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(imported.arrays[name], array, err_msg=name)
    return imported


@pytest.mark.parametrize("name", ["llama", "llama_biases", "mistral", "qwen3"])
def test_a_model_equals_that_of_its_hugging_face_directory(name, tmp_path):
    imported = same_model(write(tmp_path / "model.gguf", *read_folder(FOLDER / name)), FOLDER / name)
    reference = np.load(FOLDER / name / "reference.npz")
    model = with_arrays(abstract_model(imported.config), imported.arrays)
    assert error(logits_of(model, {"input_ids": reference["input_ids"]}), reference["logits"]) < 1e-5


def changed(name, tmp_path, **fields):
    folder = shutil.copytree(FOLDER / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_qwen2_has_biases(tmp_path):
    window = dict(use_sliding_window=False, layer_types=None, sliding_window=None)
    folder = changed("qwen2", tmp_path, **window)
    same_model(write(tmp_path / "model.gguf", *read_folder(folder)), folder)


def test_the_scaling_of_llama_3_is_recognised_by_its_factors(tmp_path):
    """The factors are those of the published models: for frequencies that make fewer than 1 rotation in 8192 tokens 8,
    for those that make more than 4 none, in between interpolated."""
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling |= dict(original_max_position_embeddings=8192, rope_theta=500_000.0)
    folder = changed("llama3", tmp_path, rope_parameters=scaling, rope_scaling=None)
    architecture, metadata, tensors = read_folder(folder)
    frequencies = 500_000.0 ** (-np.arange(4) / 4)
    share = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    tensors["rope_freqs.weight"] = (1 / (share + (1 - share) / 8)).astype(np.float32)
    assert tensors["rope_freqs.weight"].tolist()[0] == 1 and tensors["rope_freqs.weight"][-1] == 8
    assert "output.weight" not in tensors
    imported = same_model(write(tmp_path / "model.gguf", architecture, metadata, tensors), folder)
    assert imported.config.rope_scaling == "llama3" and imported.config.tied_output
    tensors["rope_freqs.weight"][1] = 3
    with pytest.raises(InputError, match=r"rope_freqs.weight is not the scaling of Llama 3"):
        read_source(write(tmp_path / "other.gguf", architecture, metadata, tensors))


def stored_as(array, kind):
    """The bytes of a tensor in a quantized type; those that gguf cannot write are random, with a small scale."""
    if kind.name == "Q6_K":
        blocks = np.random.default_rng(0).integers(0, 256, (array.size // 256, 210), np.uint8)
        blocks[:, -2:] = np.full(1, 0.001, np.float16).view(np.uint8)
        return blocks.reshape(array.shape[0], -1)
    return gguf.quants.quantize(array, kind)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights(name, tied, tmp_path):
    """Embeddings, queries and keys, too; as in llama.cpp, tensors whose rows are no whole blocks stay in float32."""
    config = dict(
        model_type="llama", vocab_size=61, hidden_size=64, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )  # fmt: skip
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (61, 64), "model.norm.weight": (64,), f"{layer}input_layernorm.weight": (64,),
        f"{layer}post_attention_layernorm.weight": (64,), f"{layer}self_attn.q_proj.weight": (64, 64),
        f"{layer}self_attn.k_proj.weight": (32, 64), f"{layer}self_attn.v_proj.weight": (32, 64),
        f"{layer}self_attn.o_proj.weight": (64, 64), f"{layer}mlp.gate_proj.weight": (256, 64),
        f"{layer}mlp.up_proj.weight": (256, 64), f"{layer}mlp.down_proj.weight": (64, 256),
    } | ({} if tied else {"lm_head.weight": (61, 64)})  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture, metadata, exact = read_folder(tmp_path)
    kind = gguf.GGMLQuantizationType[name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    chosen = [key for key, array in exact.items() if array.ndim == 2 and array.shape[1] % block == 0]
    stored = {key: stored_as(exact[key], kind) for key in chosen}
    kinds = {} if name == "F16" else dict.fromkeys(chosen, kind)
    path = write(tmp_path / "model.gguf", architecture, metadata, exact | stored, kinds=kinds)
    # The directory gets what the stored numbers stand for, in its own names and order.
    rounded = exact | {key: gguf.quants.dequantize(stored[key], kind) for key in chosen}
    positions = {key: np.arange(array.size, dtype=np.float32).reshape(array.shape) for key, array in arrays.items()}
    moved = dict(zip(arrays, tensors_of(config, positions, "llama").items()))
    for key, (theirs, order) in moved.items():
        arrays[key].reshape(-1)[order.reshape(-1).astype(int)] = rounded[theirs].reshape(-1)
    save_file(arrays, tmp_path / "model.safetensors")
    assert chosen and not np.array_equal(rounded[chosen[-1]], exact[chosen[-1]])
    same_model(path, tmp_path)


def test_a_file_keeps_its_chat_template(tmp_path):
    architecture, metadata, tensors = read_folder(FOLDER / "llama")
    path = write(tmp_path / "a.gguf", architecture, metadata | {".tokenizer.chat_template": "{{ messages }}"}, tensors)
    assert read_source(path).tokenizer.chat_template == "{{ messages }}"


def test_a_file_becomes_a_model_directory(tmp_path):
    """Also without the ending .gguf; as float16 it has half the bytes."""
    path = write(tmp_path / "model", *read_folder(FOLDER / "llama"))
    summary = import_model(path, tmp_path / "float32")
    assert summary["family"] == "gguf llama" and summary["tokenizer"] == "hub"
    import_model(path, tmp_path / "float16", dtype="float16")
    exact, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("float32", "float16"))
    for name, array in exact.items():
        assert rounded[name].dtype == np.float16
        np.testing.assert_array_equal(rounded[name], array.astype(np.float16))
    loaded = model_dir.load(tmp_path / "float16")
    assert loaded.tokenizer.encode("ab<|end|>") == [3, 0] and loaded.tokenizer.stop == 0
    assert loaded.provenance["history"][0]["architecture"] == "llama"


def test_weights_beyond_the_range_of_float16_are_not_written_as_float16(tmp_path):
    architecture, metadata, tensors = read_folder(FOLDER / "llama")
    tensors["output_norm.weight"] = np.full(16, 1e5, np.float32)
    path = write(tmp_path / "model.gguf", architecture, metadata, tensors)
    with pytest.raises(InputError, match=r"final_norm.scale has values beyond 65,504"):
        import_model(path, tmp_path / "output", dtype="float16")
    assert not (tmp_path / "output").exists()


# Tokenizers.


def tokenizer_of(tmp_path, tokenizer):
    architecture, metadata, tensors = read_folder(FOLDER / "llama")
    tensors = tensors | {name: np.ones((1000, 16), np.float32) for name in ("token_embd.weight", "output.weight")}
    path = write(tmp_path / "model.gguf", architecture, metadata | {"vocab_size": 1000}, tensors, tokenizer)
    return read_source(path).tokenizer


def trained(pre_tokenizer, normalizer=None):
    """Byte pairs trained by the package tokenizers, with two special tokens and one that a user defined."""
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokens.pre_tokenizer, tokens.normalizer = pre_tokenizer, normalizer
    tokens.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokens.train_from_iterator([CORPUS, " 1234" * 99, TEXT * 3], trainer)
    tokens.add_tokens([tokenizers.AddedToken("<tool call>", normalized=False)])
    return tokens


def ggml(tokens, pre, **more):
    """The metadata of a byte-level tokenizer."""
    vocabulary = tokens.get_vocab()
    names = sorted(vocabulary, key=vocabulary.get)
    types = {"<|begin|>": 3, "<|end|>": 3, "<tool call>": 4}
    merges = [" ".join(pair) for pair in json.loads(tokens.to_str())["model"]["merges"]]
    ids = {"bos_token_id": vocabulary["<|begin|>"], "eos_token_id": vocabulary["<|end|>"]}
    return {
        "model": "gpt2", "pre": pre, "tokens": names, "token_type": [types.get(name, 1) for name in names],
        "merges": merges, **ids, **more,
    }  # fmt: skip


def split(pattern):
    cut = tokenizers.pre_tokenizers
    level = cut.ByteLevel(add_prefix_space=False, use_regex=False)
    return cut.Sequence([cut.Split(tokenizers.Regex(pattern), "isolated"), level])


def gpt2():
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)


def smollm():
    return tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(individual_digits=True), gpt2()])


# Llama 3's and Qwen's patterns differ in how many digits stay together.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "pre, cut, composed",
    [("gpt-2", gpt2, False), ("smollm", smollm, False), ("llama-bpe", lambda: split(PATTERN % "{1,3}"), False),
     ("qwen2", lambda: split(PATTERN % ""), True)],
)  # fmt: skip
def test_a_byte_level_tokenizer_equals_its_tokenizer_json(pre, cut, composed, tmp_path):
    expected = trained(cut(), tokenizers.normalizers.NFC() if composed else None)
    tokenizer = tokenizer_of(tmp_path, ggml(expected, pre))
    for text in (TEXT, SAMPLE, f"<|begin|>{TEXT}<tool call> x<|end|>", ""):
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == expected.decode(ids)
    numbers = [tokenizer.decode([i]) for i in tokenizer.encode("1234")]
    assert (numbers == list("1234")) == (pre in ("smollm", "qwen2"))


def test_which_token_begins_and_which_end_a_text(tmp_path):
    expected = trained(gpt2())
    begin, end, other = (expected.token_to_id(name) for name in ("<|begin|>", "<|end|>", "<tool call>"))
    default = tokenizer_of(tmp_path, ggml(expected, "gpt-2", eot_token_id=other))
    assert not default.begins and (default.stop, default.other_stops) == (end, (other,))
    begins = tokenizer_of(tmp_path, ggml(expected, "gpt-2", add_bos_token=True))
    assert begins.begins and begins.end == begin
    assert begins.encode_source("a")[0] == begin  # as transformers would encode it with this tokenizer.json
    assert tokenizer_of(tmp_path, ggml(expected, "llama-bpe")).begins
    assert not tokenizer_of(tmp_path, ggml(expected, "llama-bpe", add_bos_token=False)).begins
    assert tokenizer_of(tmp_path, ggml(expected, "gpt-2") | {"eos_token_id": None}).stop == -1


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_equals_sentencepiece(prefix, tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, vocab_size=700,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(pieces.vocab_size())
    kinds = {6: pieces.is_byte, 3: pieces.is_control, 2: pieces.is_unknown}
    types = [next((kind for kind, applies in kinds.items() if applies(i)), 1) for i in ids]
    types[pieces.piece_to_id("<tool>")] = 4
    tokenizer = tokenizer_of(tmp_path, {
        "model": "llama", "tokens": [pieces.id_to_piece(i) for i in ids], "scores": [pieces.get_score(i) for i in ids],
        "token_type": types, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix,
    })  # fmt: skip
    for text in (TEXT, SAMPLE, "<0x41>", "x", ""):
        expected = pieces.encode(text)
        assert tokenizer.encode(text) == expected and tokenizer.decode(expected) == text
    assert tokenizer.begins and tokenizer.end == 1 and tokenizer.stop == 2
    assert tokenizer.encode("x<tool>")[-1] == pieces.piece_to_id("<tool>")
    assert tokenizer.encode("x</s>")[-1] == 2


# Errors.


def test_a_file_cut_anywhere_gets_one_clear_error(tmp_path):
    content = write(tmp_path / "whole", *read_folder(FOLDER / "llama")).read_bytes()
    path = tmp_path / "model.gguf"
    for length in {0, 3, 4, 8, 23, 24, len(content) - 1, *range(25, len(content), 997)}:
        path.write_bytes(content[:length])
        with pytest.raises(InputError) as caught:
            read_source(path)
        assert "copy it again" in str(caught.value) or "cannot read" in str(caught.value), length


@pytest.mark.parametrize("where", [b"tokenizer.ggml.token_type", b"tokenizer.ggml.tokens"])
def test_a_damaged_length_ends_in_an_error_not_in_a_loop(where, tmp_path):
    path = write(tmp_path / "model.gguf", *read_folder(FOLDER / "llama"))
    content = bytearray(path.read_bytes())
    length = content.index(where) + len(where) + 8  # after the name: the type array, the type of its entries
    content[length + 6] = 1  # 2^48 entries
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged or cut short"):
        read_source(path)


def test_any_damaged_byte_of_the_header_is_harmless_or_a_clear_error(tmp_path):
    path = write(tmp_path / "model.gguf", *read_folder(FOLDER / "llama"))
    content, rng, errors = path.read_bytes(), np.random.default_rng(0), 0
    for position in rng.integers(4, content.index(b"output_norm.weight"), 100):
        path.write_bytes(content[:position] + rng.bytes(1) + content[position + 1 :])
        try:
            read_source(path)
        except InputError:
            errors += 1
    assert errors > 50


CASES = {
    "no version": (dict(), dict(), "version 7"),
    "architecture": ({"architecture": "perceiver"}, {}, "unknown general.architecture 'perceiver'"),
    "refused architecture": ({"architecture": "gemma2"}, {}, "caps attention logits"),
    "unknown keys": ({"attention.logit_cap": 3, "more": True}, {}, "llama.attention.logit_cap=3 is unknown"),
    "experts": ({"expert_count": 8}, {}, "llama.expert_count=8 is not supported: only 0"),
    "part of a head": ({"rope.dimension_count": 2}, {}, "llama.rope.dimension_count=2 is not supported: only 4"),
    "vocabulary": ({"vocab_size": 50}, {}, "llama.vocab_size=50 is not supported: only 61"),
    "a key is missing": ({"attention.layer_norm_rms_epsilon": None}, {}, "no llama.attention.layer_norm_rms_epsilon"),
    "layers": ({"block_count": 3}, {}, "block_count=3, and there are tensors of 2 layers"),
    "uneven layers": ({"feed_forward_length": [24, 32]}, {}, "all layers must have the same"),
    "no heads": ({"attention.head_count": 0}, {}, "attention.head_count=0 is not a positive number"),
    "rotary scaling": ({"rope.scaling.type": "yarn"}, {}, "rope.scaling.type='yarn'"),
    "a part": ({".split.count": 2}, {}, "split.count=2: join its parts"),
    "an adapter": ({".general.type": "adapter"}, {}, "general.type='adapter'"),
    "another tokenizer": ({}, {"model": "t5"}, "tokenizer.ggml.model='t5' is not supported: only gpt2, llama"),
    "no tokenizer": ({}, dict.fromkeys(TOKENIZER), "tokenizer.ggml.model=None"),
    "another splitting": ({}, {"pre": "viking"}, "tokenizer.ggml.pre='viking' is not supported: only gpt-2, smollm"),
    "no splitting": ({}, {"pre": None}, "tokenizer.ggml.pre=None is not supported"),
    "tokenizer's keys": ({}, {"precompiled_charsmap": "x"}, "tokenizer.ggml.precompiled_charsmap=x is unknown"),
    "no merges": ({}, {"merges": None}, "tokenizer.ggml.merges is missing"),
    "a merge of nothing": ({}, {"merges": ["a c"]}, "no valid tokenizer"),
    "too many tokens": ({}, {"tokens": [*map(str, range(62))], "token_type": [1] * 62}, "62 tokens, and the model has"),
    "repeated tokens": ({}, {"tokens": ["a", "a", "b", "ab"]}, "1 tokens appear twice"),
    "a token's number": ({}, {"eos_token_id": 4}, "tokenizer.ggml.eos_token_id=4 is no token"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_imported_is_refused_by_name(name, tmp_path):
    changes, tokenizer, message = CASES[name]
    architecture, metadata, tensors = read_folder(FOLDER / "llama")
    architecture = changes.get("architecture", architecture)
    metadata = metadata | {key: value for key, value in changes.items() if key != "architecture"}
    path = write(tmp_path / "model.gguf", architecture, metadata, tensors, TOKENIZER | tokenizer)
    if name == "no version":
        path.write_bytes(path.read_bytes()[:4] + b"\x07\0\0\0" + path.read_bytes()[8:])
    with pytest.raises(InputError) as caught:
        import_model(path, tmp_path / "output")
    assert message in str(caught.value) and str(path) in str(caught.value)
    if name == "unknown keys":
        assert "llama.more=True is unknown" in str(caught.value)
    assert not (tmp_path / "output").exists()


def test_missing_unknown_and_misshapen_tensors_are_listed_by_their_names(tmp_path):
    architecture, metadata, tensors = read_folder(FOLDER / "llama")
    del tensors["blk.1.ffn_up.weight"], tensors["output_norm.weight"]
    tensors["blk.0.extra.weight"] = np.ones(3, np.float32)
    with pytest.raises(InputError) as caught:
        read_source(write(tmp_path / "model.gguf", architecture, metadata, tensors))
    for message in ("blk.1.ffn_up.weight is missing", "output_norm.weight is missing", "blk.0.extra.weight is unknown"):
        assert message in str(caught.value)
    tensors = read_folder(FOLDER / "llama")[2]
    tensors["blk.0.attn_k.weight"] = np.ones((12, 16), np.float32)
    with pytest.raises(InputError, match=r"blk.0.attn_k.weight has shape \(12, 16\)"):
        read_source(write(tmp_path / "shape.gguf", architecture, metadata, tensors))
    del tensors["token_embd.weight"]
    with pytest.raises(InputError, match=r"token_embd.weight is missing"):
        read_source(write(tmp_path / "table.gguf", architecture, metadata, tensors))
    tensors = read_folder(FOLDER / "llama")[2] | {"blk.0.attn_k.weight": np.ones((8, 16), np.int32)}
    with pytest.raises(InputError, match=r"blk.0.attn_k.weight has type I32, which is not supported"):
        read_source(write(tmp_path / "type.gguf", architecture, metadata, tensors))


def test_without_the_package_the_error_names_its_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", *read_folder(FOLDER / "llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"needs the package gguf: pip install 't2r\[gguf\]'"):
        read_source(path)


def test_languages_are_not_for_gguf(tmp_path):
    path = write(tmp_path / "model.gguf", *read_folder(FOLDER / "llama"))
    with pytest.raises(InputError, match="leave out --source_language"):
        import_model(path, tmp_path / "output", target_language="en_XX")
