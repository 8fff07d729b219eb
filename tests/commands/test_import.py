"""Importing models of other libraries and generating with them, from the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from conftest import PROSE, error
from t2r.data.tokenizer import SentencePiece, load_pair, stop_ids
from t2r.decode import beam
from t2r.decode.generate import generate_tokens, prefill_translation
from t2r.errors import InputError
from t2r.evaluation.logits import logits_of
from t2r.importers import tokenizers
from t2r.importers.source import read_source
from t2r.importers.tokenizers import Languages
from t2r.store import model_dir, tensors
from tests.importers.make_references import FOLDER


def with_tokenizer(folder):
    """Adds a byte-pair tokenizer of 61 tokens, which puts <s> before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    tokens.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=61, special_tokens=special))
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens.save(str(folder / "tokenizer.json"))
    return tokens


def test_a_language_model_is_imported_with_its_tokenizer(tmp_path, call):
    source = shutil.copytree(FOLDER / "llama", tmp_path / "llama")
    tokens = with_tokenizer(source)
    (source / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 5]}')
    templates = [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    status, result = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 0, result
    assert (result["family"], result["layers"], result["tokenizer"]) == ("llama", 2, "hub")
    assert (tmp_path / "ours" / "chat_template.jinja").read_text() == "{{ messages }}"
    _, tokenizer, provenance = model_dir.load(tmp_path / "ours")
    assert provenance["history"][0]["action"] == "import"
    assert tokenizer.begins and (tokenizer.end, tokenizer.stop) == (1, 2)
    assert stop_ids(tokenizer) == (2, 5, 1), "all stop tokens of generation_config, and another begin token"
    text = "The quick fox counts two boats"
    assert tokenizer.encode(text) == tokens.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_document("a")[-2:] == [2, 1], "the stop token, and the begin token of the next document"

    ids = FOLDER / "llama" / "reference.npz"
    status, _ = call("evaluate", f"--model={tmp_path}/ours", f"--logits={ids}:{tmp_path}/logits.npz")
    assert status == 0
    assert error(np.load(tmp_path / "logits.npz")["logits"], np.load(ids)["logits"]) < 1e-5
    status, printed = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 2 and "exists already" in printed


@pytest.mark.slow
def test_a_multilingual_model_translates_between_chosen_languages(tmp_path, call):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    source = shutil.copytree(FOLDER / "mbart", tmp_path / "mbart")
    special = ["<s>", "<pad>", "</s>", "<unk>", "en_XX", "de_DE", "ro_RO"]
    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=61, special_tokens=special))
    template = processors.TemplateProcessing(single="en_XX $A </s>", special_tokens=[("en_XX", 4), ("</s>", 2)])
    tokens.post_processor = template
    tokens.save(str(source / "tokenizer.json"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"decoder_start_token_id": 2, "eos_token_id": 2}))

    command = ["import", f"--source={source}", "--source_language=de_DE"]
    status, printed = call(*command, f"--output={tmp_path}/none", "--target_language=fr_XX")
    assert status == 2 and "--target_language=fr_XX: choose from en_XX, de_DE, ro_RO" in printed
    status, _ = call(*command, f"--output={tmp_path}/ours", "--target_language=ro_RO")
    assert status == 0
    model, pair, _ = model_dir.load(tmp_path / "ours")
    ids = tokens.encode("two boats", add_special_tokens=False).ids
    assert pair.encode_source("two boats") == [5, *ids, 2] and pair.encode_target("two boats") == [2, 6, *ids, 2]

    sources = np.array([pair.encode_source("two boats")])
    generated = [2, 6]
    for _ in range(5):
        logits = logits_of(model, {"input_ids": sources, "decoder_input_ids": np.array([generated])})
        generated.append(int(logits[0, -1].argmax()))
    (hypothesis,) = beam.translate(model, sources, start=(2, 6), end=2, beam=beam.Beam(1), limits=[5])[0]
    sampled = generate_tokens(model, prefill_translation(model, sources, 5, start=(2, 6)), 5, end=2)[1][0]
    expected = generated[2:][: generated[2:].index(2)] if 2 in generated[2:] else generated[2:]
    assert hypothesis.tokens == sampled == expected
    best = beam.translate(model, sources, start=(2, 6), end=2, beam=beam.Beam(3), limits=[5])[0][0]
    assert best.score == pytest.approx(best.log_probability / (len(best.tokens) + 2) ** 0.6), (
        "the language token counts in the length"
    )


def test_nllb_sources_begin_with_their_language(tmp_path):
    """Also where tokenizer.json has the order of its first version: the text, </s>, then the language."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    source = shutil.copytree(FOLDER / "m2m100", tmp_path / "nllb")
    special = ["<s>", "<pad>", "</s>", "<unk>", "eng_Latn", "zho_Hans", "deu_Latn"]
    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=61, special_tokens=special))
    specials = [("eng_Latn", 4), ("</s>", 2)]
    tokens.post_processor = processors.TemplateProcessing(single="$A </s> eng_Latn", special_tokens=specials)
    tokens.save(str(source / "tokenizer.json"))
    ids = tokens.encode("two boats", add_special_tokens=False).ids
    for name, first in ((None, 4), ("deu_Latn", 6)):
        pair = read_source(source, Languages(name, "zho_Hans")).tokenizer
        assert pair.encode_source("two boats") == [first, *ids, 2]
        assert pair.encode_target("two boats") == [2, 5, *ids, 2]
        assert pair.target.padding == 1
    (source / "tokenizer_config.json").write_text('{"src_lang": "zho_Hans"}')
    assert read_source(source, Languages(None, "eng_Latn")).tokenizer.encode_source("two")[0] == 5
    with pytest.raises(InputError, match="--target_language=de_DE: choose from eng_Latn, zho_Hans, deu_Latn"):
        read_source(source, Languages(None, "de_DE"))


def test_m2m100_has_pieces_and_languages(tmp_path):
    source = shutil.copytree(FOLDER / "m2m100", tmp_path / "m2m100")
    SentencePiece.train(PROSE, 300, sentences=True).save(tmp_path)
    shutil.copy(tmp_path / "tokenizer.model", source / "sentencepiece.bpe.model")
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    split = processor.encode("The fox counts two", out_type=str)
    names = ["<s>", "<pad>", "</s>", "<unk>", *dict.fromkeys(split)]
    (source / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False))
    codes = ["__af__", "__de__", "__en__"]
    (source / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": codes}))
    with pytest.raises(InputError, match="has 3 languages: give --source_language and --target_language"):
        read_source(source)
    pair = read_source(source, Languages("en", "de")).tokenizer
    ids = [names.index(piece) for piece in split]
    assert pair.encode_source("The fox counts two") == [len(names) + 2, *ids, 2]
    assert pair.encode_target("The fox counts two") == [2, len(names) + 1, *ids, 2]
    assert pair.target.decode([2, len(names) + 1, *ids, 2]) == "The fox counts two"
    (tmp_path / "saved").mkdir()
    pair.save(tmp_path / "saved")
    again = load_pair(tmp_path / "saved")
    assert again.encode_source("The fox") == pair.encode_source("The fox")
    assert again.encode_target("The fox") == pair.encode_target("The fox")


@pytest.mark.slow
def test_m2m100_tokenizes_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    SentencePiece.train(PROSE, 300, sentences=True).save(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    pieces = [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False))
    shutil.move(tmp_path / "tokenizer.model", tmp_path / "sentencepiece.bpe.model")
    files = {"vocab_file": tmp_path / "vocab.json", "spm_file": tmp_path / "sentencepiece.bpe.model"}
    theirs = transformers.M2M100Tokenizer(
        **{key: str(path) for key, path in files.items()}, src_lang="en", tgt_lang="de"
    )
    codes = [theirs.get_lang_token(code) for code in theirs.lang_code_to_token]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": codes}))
    config = {"model_type": "m2m_100", "decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2}
    ours = tokenizers.find_tokenizer(tmp_path, config, translates=True, chosen=Languages("en", "de"))
    text = "The lazy clerk counts ninety boats"
    assert ours.encode_source(text) == theirs(text).input_ids
    assert ours.encode_target(text) == [2, *theirs(text_target=text).input_ids]


def test_a_translation_model_is_imported_with_its_tokenizers(tmp_path, call):
    """Marian: two sentencepiece models and a vocabulary in another order; decoding starts from <pad>."""
    source = shutil.copytree(FOLDER / "marian", tmp_path / "marian")
    pieces = SentencePiece.train(PROSE, 300, sentences=True)
    pieces.save(tmp_path)
    for name in ("source.spm", "target.spm"):
        shutil.copy(tmp_path / "tokenizer.model", source / name)
    split = sentencepiece.SentencePieceProcessor(str(source / "source.spm")).encode("The fox counts two", out_type=str)
    used = ["<unk>", "<pad>", "</s>", *dict.fromkeys(split)]
    names = used + [f"piece{i}" for i in range(61 - len(used))]
    (source / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False))
    status, result = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 0 and result["tokenizer"] == "pieces", result
    _, tokenizer, _ = model_dir.load(tmp_path / "ours")
    ids = [used.index(piece) for piece in split]
    assert tokenizer.encode_source("The fox counts two") == [*ids, 2]
    assert tokenizer.encode_target("The fox counts two") == [1, *ids, 2]
    assert tokenizer.target.decode([*ids, 2]) == "The fox counts two"
    assert 0 in tokenizer.source.encode("Q"), "an unknown piece"
    (tmp_path / "lines").write_text("The fox counts two\n\nthe fox\n")
    flags = [f"--model={tmp_path}/ours", f"--input={tmp_path}/lines", f"--output={tmp_path}/out", "--beam=2"]
    status, result = call("translate", *flags)
    assert status == 0, result
    assert len((tmp_path / "out").read_text().splitlines()) == 3


PEAK_MEMORY = """
import importlib, sys
from absl import flags
from t2r.store import model_dir

command = importlib.import_module("t2r.commands.import")

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def import_and_load(source):
    flags.FLAGS(["t2r", f"--source={source}", f"--output={source}/ours"])
    command.main()
    return model_dir.load(f"{source}/ours")

small = import_and_load(sys.argv[1])
before = peak()
large = import_and_load(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory of a process from Linux")
def test_a_model_is_never_in_memory_twice(tmp_path):
    """Neither in its original type beside float32, nor while it is saved and loaded."""
    small, large = (shutil.copytree(FOLDER / "llama", tmp_path / name) for name in ("small", "large"))
    for folder in (small, large):
        with_tokenizer(folder)
    width, hidden, vocabulary = 1024, 2560, 4096
    config = json.loads((large / "config.json").read_text())
    config |= {"hidden_size": width, "head_dim": width // 4, "intermediate_size": hidden, "vocab_size": vocabulary}
    (large / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    sizes = {16: width, 24: hidden, 61: vocabulary, 8: width // 2}  # the small model's size: the large model's
    arrays = {}
    for name, array in tensors.Tensors(small).items():
        for layer in range(4) if ".0." in name else [] if ".1." in name else [0]:
            shape = [sizes[size] for size in array.shape]
            arrays[name.replace(".0.", f".{layer}.")] = np.zeros(shape, np.float16)
    tensors.write(large / "model.safetensors", arrays, "bfloat16")
    command = [sys.executable, "-c", PEAK_MEMORY, small, large]
    run = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert run.returncode == 0, run.stderr
    size = (large / "ours" / "model.safetensors").stat().st_size
    assert size > 150e6 and int(run.stdout.splitlines()[-1]) < 1.3 * size


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source=/no/such/folder", "--output=/tmp/none"], "/no/such/folder does not exist"),
        ([f"--source={FOLDER / 'llama'}", "--output=/tmp/none"], "no tokenizer in"),
    ],
)
def test_errors_name_what_is_missing(call, flags, message):
    status, printed = call("import", *flags)
    assert status == 2 and message in printed
