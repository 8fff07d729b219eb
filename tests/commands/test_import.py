"""From a directory of another library to text, in two commands."""

import json
import shutil

import numpy as np
import pytest
import sentencepiece

from conftest import PROSE, error
from t2r.convert import model_dir
from t2r.data.tokenizer import SentencePiece
from tests.convert.make_references import FOLDER


def with_tokenizer(folder):
    """A byte-pair tokenizer of 61 tokens that puts <s> before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    tokens.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=61, special_tokens=special))
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens.save(str(folder / "tokenizer.json"))
    return tokens


def test_a_language_model_comes_with_its_tokenizer(tmp_path, call):
    source = shutil.copytree(FOLDER / "llama", tmp_path / "llama")
    tokens = with_tokenizer(source)
    status, result = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 0, result
    assert (result["family"], result["layers"], result["tokenizer"]) == ("llama", 2, "hub")
    _, tokenizer, provenance = model_dir.load(tmp_path / "ours")
    assert provenance["history"][0]["action"] == "import"
    assert tokenizer.begins and (tokenizer.end, tokenizer.stop) == (1, 2)
    text = "The quick fox counts two boats"
    assert tokenizer.encode(text) == tokens.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_document("a")[-2:] == [2, 1], "the end of one text, the beginning of the next"

    ids = FOLDER / "llama" / "reference.npz"
    status, _ = call("evaluate", f"--model={tmp_path}/ours", f"--logits={ids}:{tmp_path}/logits.npz")
    assert status == 0
    assert error(np.load(tmp_path / "logits.npz")["logits"], np.load(ids)["logits"]) < 1e-5
    status, printed = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 2 and "exists already" in printed


def test_a_translation_model_comes_with_its_pieces(tmp_path, call):
    """Two sentencepiece models and a vocabulary in another order; decoding starts from padding."""
    source = shutil.copytree(FOLDER / "marian", tmp_path / "marian")
    pieces = SentencePiece.train(PROSE, 300, sentences=True)
    pieces.save(tmp_path)
    for name in ("source.spm", "target.spm"):
        shutil.copy(tmp_path / "tokenizer.model", source / name)
    cut = sentencepiece.SentencePieceProcessor(str(source / "source.spm")).encode("The fox counts two", out_type=str)
    known = ["<unk>", "<pad>", "</s>", *dict.fromkeys(cut)]
    names = known + [f"piece{i}" for i in range(61 - len(known))]
    (source / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False))
    status, result = call("import", f"--source={source}", f"--output={tmp_path}/ours")
    assert status == 0 and result["tokenizer"] == "pieces", result
    _, tokenizer, _ = model_dir.load(tmp_path / "ours")
    ids = [known.index(piece) for piece in cut]
    assert tokenizer.encode_source("The fox counts two") == [*ids, 2]
    assert tokenizer.encode_target("The fox counts two") == [1, *ids, 2]
    assert tokenizer.target.decode([*ids, 2]) == "The fox counts two"
    assert 0 in tokenizer.source.encode("Q"), "an unknown piece"
    (tmp_path / "lines").write_text("The fox counts two\n\nthe fox\n")
    flags = [f"--model={tmp_path}/ours", f"--input={tmp_path}/lines", f"--output={tmp_path}/out", "--beam=2"]
    status, result = call("translate", *flags)
    assert status == 0, result
    assert len((tmp_path / "out").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source=/no/such/folder", "--output=/tmp/none"], "no /no/such/folder/config.json"),
        ([f"--source={FOLDER / 'llama'}", "--output=/tmp/none"], "no tokenizer in"),
    ],
)
def test_what_is_missing_is_said(call, flags, message):
    status, printed = call("import", *flags)
    assert status == 2 and message in printed
