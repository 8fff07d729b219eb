"""Imported fairseq checkpoints, old and new, equal a plain reference; and no code in them is executed."""

import argparse
import functools
import itertools
from collections import OrderedDict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from conftest import error
from t2r.errors import InputError
from t2r.importers import fairseq, tokenizers, torch_file
from t2r.model.parameters import abstract_model, with_arrays
from t2r.store import model_dir
from tests.importers.fairseq_files import (
    ADAPTIVE,
    LM,
    MT,
    VOCABULARY,
    Call,
    Global,
    Reference,
    dictionary,
    namespace,
    old_names,
    omegaconf,
    weights,
    write,
)

WORDS = [f"word{i}" for i in range(VOCABULARY - 6)] + ["madeupword0000", "madeupword0001"]
OLD_ADAPTIVE = {name: value for name, value in ADAPTIVE.items() if name != "tie_adaptive_proj"}
SEPARATE = dict(
    MT, encoder_normalize_before=True, decoder_normalize_before=True, activation_fn="gelu", layernorm_embedding=True,
    encoder_learned_pos=True, decoder_learned_pos=True, no_scale_embedding=True,
)  # fmt: skip
NESTED = {  # as hydra stores it: the decoder's settings nested, some of them references to others
    "_name": "transformer_lm", "share_decoder_input_output_embed": True, "decoder_input_dim": "${model.decoder.width}",
    "decoder": {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2, "normalize_before": True},
}  # fmt: skip


def model_of(path):
    config, arrays, settings = fairseq.load_checkpoint(path)
    return with_arrays(abstract_model(config), jax.tree.map(jnp.asarray, arrays)), settings


@functools.partial(jax.jit, static_argnums=0)
def log_probs(graph, state, target, source):
    model = nnx.merge(graph, state)
    states = None if source is None else model.source_states(source, jnp.ones(source.shape, bool))
    return model.log_probs(model(target, source=states)[0])


def compare(path, c, arrays, source_size=VOCABULARY):
    rng = np.random.default_rng(1)
    target = np.array([2, *rng.permutation(VOCABULARY)[:12]])
    source = rng.integers(4, source_size, 7) if "encoder_layers" in c else None
    model, _ = model_of(path)
    inputs = [None if ids is None else jnp.asarray(ids[None], jnp.int32) for ids in (target, source)]
    actual, expected = log_probs(*nnx.split(model), *inputs)[0], Reference(c, arrays).log_probs(target, source)
    bounds = (0, 12, 30, VOCABULARY)
    for low, high in itertools.pairwise(bounds):  # each band, where there are bands
        assert error(actual[:, low:high], expected[:, low:high]) < 1e-4


def test_an_adaptive_language_model_equals_the_reference(tmp_path):
    arrays = weights(ADAPTIVE)
    write(tmp_path / "model.pt", {"args": namespace(**ADAPTIVE), "model": arrays})
    compare(tmp_path / "model.pt", ADAPTIVE, arrays)


def test_an_old_language_model_in_half_precision_equals_the_reference(tmp_path):
    arrays = {name: array.astype(np.float16) for name, array in weights(ADAPTIVE, seed=2).items()}
    settings = namespace(**OLD_ADAPTIVE, no_tie_adaptive_proj=False)
    write(tmp_path / "old.pt", {"args": settings, "model": old_names(arrays)}, legacy=True)
    compare(tmp_path / "old.pt", ADAPTIVE, arrays)


@pytest.mark.parametrize("wrap", [lambda value: value, omegaconf])
def test_a_plain_language_model_with_new_settings_equals_the_reference(tmp_path, wrap):
    settings = {"model": NESTED, "task": {"_name": "language_modeling", "add_bos_token": False}, "bpe": None}
    c = dict(LM, share_decoder_input_output_embed=True)
    arrays = weights(c)
    write(tmp_path / "model.pt", {"args": None, "cfg": wrap(settings), "model": arrays})
    if wrap is omegaconf:  # the same settings and weights, in other objects
        assert fairseq.load_checkpoint(tmp_path / "model.pt")[0].heads == 2
    else:
        compare(tmp_path / "model.pt", c, arrays)


def test_a_translation_model_equals_the_reference(tmp_path):
    c = dict(MT, share_all_embeddings=True)
    arrays = weights(c)
    write(tmp_path / "model.pt", {"args": namespace(**c), "model": arrays})
    compare(tmp_path / "model.pt", c, arrays)


def test_copies_of_encoder_weights_are_ignored(tmp_path):
    """fairseq 0.12 has each encoder layer's weights a second time, for a fused kernel; stored as zeros."""
    c = dict(MT, share_all_embeddings=True)
    arrays = weights(c)
    copies = {"in_proj_weight": (48, 16), "in_proj_bias": (48,), "out_proj_weight": (16, 16), "out_proj_bias": (16,)}
    copies |= {"fc1_weight": (24, 16), "fc1_bias": (24,), "fc2_weight": (16, 24), "fc2_bias": (16,)}
    zeros = {f"encoder.layers.0.{name}": np.zeros(shape, np.float32) for name, shape in copies.items()}
    write(tmp_path / "model.pt", {"args": namespace(**c), "model": arrays | zeros})
    compare(tmp_path / "model.pt", c, arrays)


def test_an_old_translation_model_with_separate_vocabularies_equals_the_reference(tmp_path):
    arrays = weights(SEPARATE, source=30, positions=20)
    write(tmp_path / "model.pt", {"args": namespace(**SEPARATE), "model": old_names(arrays)}, legacy=True)
    compare(tmp_path / "model.pt", SEPARATE, arrays, source_size=30)


def some_tensors():
    table = np.arange(24, dtype=np.float32).reshape(4, 6)
    shapes = {"whole": table, "strided": table[1:, ::2], "transposed": table.T, "empty": np.zeros((0, 3), np.float32)}
    types = (np.float16, ml_dtypes.bfloat16, np.float64, np.int64)
    return shapes | {np.dtype(dtype).name: np.linspace(-2, 2, 5).astype(dtype) for dtype in types}


def check(read, tensors):
    for name, expected in tensors.items():
        array = read[name].array()
        assert array.dtype == expected.dtype and np.array_equal(array, expected), name
        assert not array.flags.owndata or not array.size, "a view of the file, which is read only when it is used"


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_of_all_kinds_are_read(tmp_path, legacy):
    tensors = some_tensors()
    write(tmp_path / "x.pt", tensors, legacy=legacy)
    check(torch_file.read(tmp_path / "x.pt"), tensors)


@pytest.mark.parametrize("legacy", [False, True])
def test_files_written_by_torch_are_read(tmp_path, legacy):
    torch = pytest.importorskip("torch")
    tensors = {name: array for name, array in some_tensors().items() if array.dtype != ml_dtypes.bfloat16}
    state_dict = OrderedDict((name, torch.from_numpy(array)) for name, array in tensors.items())
    state_dict["parameter"] = torch.nn.Parameter(state_dict["whole"].bfloat16())
    state_dict._metadata = {"version": 1}
    other = {"args": argparse.Namespace(a=[1, 2]), "n": np.float64(3), "type": torch.float16, "set": {1}}
    torch.save({"model": state_dict, **other}, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    read = torch_file.read(tmp_path / "x.pt")
    check(read["model"], tensors | {"parameter": tensors["whole"].astype(ml_dtypes.bfloat16)})
    assert read["args"].state == {"a": [1, 2]}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "name", ["os.system", "posix.system", "builtins.eval", "builtins.getattr", "functools.partial", "torch.load",
             "subprocess.Popen", "torch._utils.os.system", "collections.namedtuple"]
)  # fmt: skip
def test_no_code_is_run(tmp_path, name, legacy):
    marker = tmp_path / "marker"
    call = Call(Global(*name.rsplit(".", 1)), (f"touch {marker}",))
    write(tmp_path / "x.pt", {"model": {}, "args": call}, legacy=legacy)
    with pytest.raises(InputError, match=f"it names {name}, which") as caught:
        torch_file.read(tmp_path / "x.pt")
    assert not marker.exists() and "x.pt is refused" in str(caught.value)


def test_shells_do_nothing(tmp_path):
    """Whatever a pickle calls or sets on a shell, it stays a shell."""
    marker = tmp_path / "marker"
    inner = Call(Global("fairseq.os", "system"), (f"touch {marker}",), {"__class__": 1})
    write(tmp_path / "x.pt", Call(Global("numpy.core.multiarray", "scalar"), (inner,), {"__reduce__": inner}))
    assert isinstance(torch_file.read(tmp_path / "x.pt").values[0], torch_file.Shell) and not marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_is_cut_short_is_one_error(tmp_path, legacy):
    path = tmp_path / "x.pt"
    write(path, some_tensors(), legacy=legacy)
    whole = path.read_bytes()
    for length in (0, 3, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="cut short"):
            torch_file.read(path)


def test_tensors_stay_within_their_storage(tmp_path):
    strided = np.lib.stride_tricks.as_strided
    table = np.zeros((3, 4), np.float32)
    arrays = weights(LM) | {"beyond": strided(table, (4, 4), (16, 4)), "spread": strided(table, (10**9,), (0,))}
    write(tmp_path / "model.pt", {"args": namespace(**LM), "model": arrays})
    with pytest.raises(InputError, match=r"(?s)beyond: shape \(4, 4\).*spread: shape") as caught:
        fairseq.load_checkpoint(tmp_path / "model.pt")
    assert "exceed 12 values" in str(caught.value)


def changed(kind):
    """Settings and weights of a model that cannot be imported."""
    c, arrays = dict(ADAPTIVE), weights(ADAPTIVE)
    layer, tail = "decoder.layers.1", "decoder.adaptive_softmax.tail.0"
    if kind == "missing and unknown":
        del arrays[f"{layer}.fc1.weight"], arrays["decoder.layers.0.final_layer_norm.bias"]
        arrays[f"{layer}.self_attn.bias_k"] = np.ones(3, np.float32)
    elif kind == "wrong shapes":
        arrays[f"{layer}.fc1.weight"] = np.ones((25, 16), np.float32)
        arrays[f"{layer}.fc2.bias"] = np.ones(15, np.float32)
    elif kind == "unknown architecture":
        c["arch"] = "fconv_wmt_en_de"
    elif kind == "untied projections":
        arrays[f"{tail}.0.weight"] = np.ones((4, 16), np.float32)
    elif kind == "only an adaptive softmax":
        c, arrays = dict(LM, adaptive_softmax_cutoff="12,30"), weights(LM)
    elif kind == "several features":
        c |= dict(scale_heads=True, add_bos_token=True, activation_fn="tanh", decoder_output_dim=8)
    elif kind == "encoder unlike decoder":
        c = dict(MT, encoder_ffn_embed_dim=48, encoder_normalize_before=True)
        arrays = weights(c)
    elif kind == "a setting is missing":
        del c["decoder_attention_heads"]
    return c, arrays


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("missing and unknown", ["1.fc1.weight is missing", "0.final_layer_norm.bias is missing", "bias_k is unknown"]),
        ("wrong shapes", ["1.fc1.weight has shape (25, 16)", "1.fc2.bias has shape (15,)"]),
        ("unknown architecture", ["unknown architecture 'fconv_wmt_en_de'", "transformer_lm*", "transformer_tiny"]),
        ("untied projections", ["tie_adaptive_proj=False", "tail.0.0.weight differs from"]),
        ("only an adaptive softmax", ["adaptive_input=False and adaptive_softmax_cutoff=12,30"]),
        ("several features", ["scale_heads=True", "add_bos_token", "activation_fn='tanh'", "decoder_output_dim=8"]),
        ("encoder unlike decoder", ["encoder_ffn_embed_dim=48 and", "encoder_normalize_before", "only one of encoder"]),
        ("a setting is missing", ["has no 'decoder_attention_heads'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_gets_one_clear_error(tmp_path, kind, messages):
    c, arrays = changed(kind)
    write(tmp_path / "model.pt", {"args": namespace(**c), "model": arrays})
    with pytest.raises(InputError) as caught:
        fairseq.load_checkpoint(tmp_path / "model.pt")
    for message in messages:
        assert message in str(caught.value)


def test_dictionaries_are_read_as_in_fairseq(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("the 9\na 5\nthe 3 #fairseq:overwrite\n\u2028 2\nmadeupword0000 0\n", "utf-8")
    words = tokenizers.dictionary(path, 9)
    assert words == ["<s>", "<pad>", "</s>", "<unk>", "the", "a", "the", "\u2028", "madeupword0000"]
    assert tokenizers.FairseqWords(words).encode("the a \n b") == [6, 5, 2, 3]
    with pytest.raises(InputError, match="vocabulary of another model"):
        tokenizers.dictionary(path, 10)
    path.write_text("the 9\na\nthe 3\n")
    with pytest.raises(InputError, match=r"(?s)line 2 is 'a'.*line 3: 'the' is a duplicate"):
        tokenizers.dictionary(path, 7)


def test_a_language_model_from_the_command_line(tmp_path, call):
    source = tmp_path / "wiki"
    source.mkdir()
    write(source / "checkpoint_best.pt", {"args": namespace(**ADAPTIVE), "model": weights(ADAPTIVE)})
    (source / "checkpoint_last.pt").write_bytes(b"another")
    dictionary(source / "dict.txt", WORDS)
    status, result = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 0, result
    assert (result["family"], result["layers"]) == ("fairseq transformer_lm", 2)
    assert result["tokenizer"] == "fairseq_word"
    _, tokenizer, provenance = model_dir.load(tmp_path / "ours")
    assert provenance["history"][0]["architecture"] == "transformer_lm_wiki103"
    assert tokenizer.encode_document("word0 other\nword1") == [4, 3, 2, 5, 2]
    status, result = call("generate", f"--model={tmp_path}/ours", "--prompt=word0 word1", "--length=3")
    assert status == 0 and result["tokens"] == 3
    (tmp_path / "text").write_text("word0 word2\n\nword9 other word37\n" * 3)
    status, result = call("evaluate", f"--model={tmp_path}/ours", f"--data=text:{tmp_path}/text", "--window=8")
    assert status == 0 and (result["tokens"], result["unknown_words"]) == (24, 3)

    ids = np.array([[2, 7, 20, 40, 3]])
    np.savez(tmp_path / "ids.npz", input_ids=ids)
    command = ["evaluate", f"--model={tmp_path}/ours"]
    status, printed = call(*command, f"--logits={tmp_path}/ids.npz:{tmp_path}/out.npz")
    assert status == 2 and "has no logits over the whole vocabulary: compare log-probabilities (--log_probs)" in printed
    status, result = call(*command, f"--log_probs={tmp_path}/ids.npz:{tmp_path}/out.npz")
    assert status == 0 and result == {"log_probs": f"{tmp_path}/out.npz", "shape": [1, 5, VOCABULARY]}
    expected = Reference(ADAPTIVE, weights(ADAPTIVE)).log_probs(ids[0])
    assert error(np.load(tmp_path / "out.npz")["log_probs"][0], expected) < 1e-5
    status, printed = call(*command, "--logits=a:b", "--log_probs=a:b")
    assert status == 2 and "give one of --data=SPEC, --logits=IN.npz:OUT.npz and --log_probs" in printed

    dictionary(source / "dict.txt", WORDS[:-1])
    status, printed = call("import", f"--source={source}/checkpoint_best.pt", f"--output={tmp_path}/again")
    assert status == 2 and "vocabulary of another model" in printed and not (tmp_path / "again").exists()
    (source / "checkpoint_best.pt").rename(source / "checkpoint1.pt")
    status, printed = call("import", f"--source={source}", f"--output={tmp_path}/again")
    assert status == 2 and "choose one: checkpoint1.pt, checkpoint_last.pt" in printed


def test_a_translation_model_from_the_command_line(tmp_path, call):
    source, c = tmp_path / "wmt", dict(MT, share_all_embeddings=True)
    source.mkdir()
    write(source / "model.pt", {"args": namespace(**c), "model": weights(c)}, legacy=True)
    words = ["low@@", "er", "low", ".", "ne@@", "w", *WORDS][: VOCABULARY - 4]
    for language in ("en", "de"):
        dictionary(source / f"dict.{language}.txt", words)
    (source / "bpecodes").write_text("#version: 0.2\nl o\nlo w</w>\nlo w\ne r</w>\nn e\n")
    status, result = call("import", f"--source={source}/model.pt", f"--output={tmp_path}/ours")
    assert status == 0, result
    assert (result["family"], result["tokenizer"]) == ("fairseq transformer", "fairseq_subword")
    _, tokenizer, _ = model_dir.load(tmp_path / "ours")
    assert tokenizer.encode_source("lower low, new.") == [4, 5, 6, 3, 8, 9, 7, 2]
    assert tokenizer.encode_target("low") == [2, 6, 2]
    assert tokenizer.target.decode([4, 5, 8, 9, 7]) == "lower new."
    (tmp_path / "en").write_text("lower low.\n\nnew\n")
    (tmp_path / "de").write_text("low\nlow\nlow\n")
    flags = [f"--model={tmp_path}/ours", "--beam=2"]
    status, result = call("translate", *flags, f"--input={tmp_path}/en", f"--output={tmp_path}/out")
    assert status == 0 and len((tmp_path / "out").read_text().splitlines()) == 3, result
    status, result = call("evaluate", *flags, f"--data=pairs:{tmp_path}/en,{tmp_path}/de")
    assert status == 0 and "bleu" in result, result
