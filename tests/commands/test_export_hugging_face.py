"""Models exported to Hugging Face's form compute in transformers what they compute here."""

import ast
import io
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from conftest import PROSE, WINDOW, make_model, micro, micro_mt, slow_but
from t2r.batch import PADDING, pad_sequences
from t2r.data.tokenizer import (
    KINDS,
    FairseqSubwords,
    FairseqWords,
    Hub,
    Pieces,
    SentencePiece,
    TokenizerPair,
    Words,
    prompt_ids,
    stop_ids,
)
from t2r.decode import beam
from t2r.decode.beam import Beam
from t2r.decode.generate import generate_tokens, prefill
from t2r.export import card as model_card
from t2r.export import hugging_face
from t2r.model.config import AttentionSpec
from t2r.model.loss import source_states
from t2r.model.parameters import arrays_of, with_arrays
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel
from tests.commands.test_export import NEW_CODES, SPECIAL, SUBWORDS
from tests.importers.make_references import FOLDER
from tests.importers.test_importers import load as load_imported

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

T2R, MERGED, SOFTMAX = AttentionSpec("linear", "t2r", 8), AttentionSpec("merged", "t2r", 8), AttentionSpec()


def spec(kind: str, name: str, **fields) -> AttentionSpec:
    return AttentionSpec(kind, name, None if name == "elu" else 8, **fields)


PLAIN = dict(vocab_size=300, adaptive_cutoffs=())
ROTARY = dict(PLAIN, positions="rotary", norm="rms", gated=True, activation="swish", bias=False, kv_heads=1)
LANGUAGE_MODELS = {
    "merged": micro(vocab_size=300, attention=(MERGED, T2R)),
    "windowed": micro(**ROTARY, attention=(spec("windowed", "t2r", **WINDOW), SOFTMAX)),
    "softmax": micro(**PLAIN, positions="learned", max_positions=170, embedding_norm=True, tied_output=False),
    "elu": micro(**PLAIN, attention=(spec("linear", "elu"), spec("windowed", "elu", window=70)), activation="gelu"),
    "rfa": micro(
        **PLAIN, attention=(spec("linear", "rfa"), spec("windowed", "rfa_fixed", **WINDOW)),
        positions="sinusoidal_open", activation="gelu_exact", norm_placement="after", output_bias=True,
        scale_embedding=False, position_offset=2,
    ),
    "performer": micro(
        **PLAIN, attention=(spec("linear", "performer"), spec("windowed", "performer", **WINDOW)), positions="none",
        norm_placement="both", norm="rms", embedding_multiplier=3.0, final_norm=True,
    ),
    "hedgehog": micro(
        **ROTARY, layers=3,
        attention=(spec("linear", "hedgehog"), spec("windowed", "t2r_elu", **WINDOW), spec("linear", "t2r_elu")),
    ),
    "query norm": micro(
        **ROTARY | dict(kv_heads=2, projection_bias=True, out_bias=True), query_norm=True, norm_placement="output",
        rope_scaling="llama3", rope_factor=8.0, rope_original=64,
        attention=(T2R, AttentionSpec(rotary=False, window=9)),
    ),
    "norm of all heads": micro(
        **ROTARY, query_norm=True, query_norm_heads=True, rope_scaling="linear", rope_factor=2.0,
        attention=(spec("linear", "t2r", rope_theta=500.0), SOFTMAX),
    ),
    "parallel": micro(
        **ROTARY, parallel=True, rope_size=8, rope_scaling="factors", rope_factors=(1.0, 1.5, 2.0, 2.5), rope_gain=1.2,
        max_positions=170, attention=(spec("linear", "performer"), spec("windowed", "t2r", window=5, sinks=0)),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """transformers copies the code of models into its cache of modules: here, into the folder of the test."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def load(folder, **options):
    """The exported model and its tokenizer, as a user loads them."""
    config = json.loads((folder / "config.json").read_text())
    auto = transformers.AutoModelForSeq2SeqLM if config["is_encoder_decoder"] else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, trust_remote_code=True, **options)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def exported(folder, content: LoadedModel, **options):
    hugging_face.save(folder, content, **options)
    return load(folder)


def padded_left(lengths, length: int, vocab: int = 300):
    """Random tokens (b, length) and their mask: padding comes first."""
    tokens = np.random.default_rng(0).integers(4, vocab, (len(lengths), length))
    return tokens, np.arange(length) >= length - np.array(lengths)[:, None]


def largest_difference(theirs, ours, mask) -> float:
    difference = np.abs(theirs.detach().numpy() - np.asarray(ours))[mask]
    assert np.isfinite(difference).all()
    return float(difference.max())


@pytest.mark.parametrize("kind", slow_but(LANGUAGE_MODELS, "merged"))
def test_a_language_model_equals_the_original(kind, tmp_path, tokenizer):
    """Logits of a batch with padding, at once and through the cache in pieces and single tokens; greedy generation."""
    model = make_model(LANGUAGE_MODELS[kind])
    theirs, _ = exported(tmp_path / "out", LoadedModel(model, tokenizer, {"history": []}))
    tokens, mask = padded_left([150, 101], 150)
    ours = jax.jit(lambda tokens, mask: model.logits(model(tokens, mask=mask)[0]))(jnp.asarray(tokens), mask)
    ids, attention_mask = torch.tensor(tokens), torch.tensor(mask).long()
    with torch.no_grad():
        assert largest_difference(theirs(ids, attention_mask=attention_mask).logits, ours, mask) < 1e-4
        cache, pieces, sizes = None, [], []
        for first, last in [(0, 70), (70, 140), *((i, i + 1) for i in range(140, 150))]:
            options = dict(attention_mask=attention_mask[:, :last], past_key_values=cache)
            out = theirs(ids[:, first:last], **options)
            cache = out.past_key_values
            pieces.append(out.logits)
            sizes.append(cache.state_bytes())
        assert largest_difference(torch.cat(pieces, 1), ours, mask) < 1e-4
    has_softmax = any(spec.kind == "softmax" for spec in model.config.attention)
    assert (len(set(sizes)) == 1) != has_softmax, "only the state of softmax layers grows"

    prompts = [tokens[0, -9:].tolist(), tokens[1, -4:].tolist()]
    _, expected = generate_tokens(model, prefill(model, prompts, 12), 12, end=stop_ids(tokenizer))
    batch = torch.tensor([prompts[0], [0] * 5 + prompts[1]])
    attention_mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    output = theirs.generate(batch, attention_mask=attention_mask, max_new_tokens=12, do_sample=False)
    for row, ids in zip(output[:, 9:].tolist(), expected, strict=True):
        assert row[: len(ids)] == ids and all(
            i in (*stop_ids(tokenizer), theirs.config.pad_token_id) for i in row[len(ids) :]
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "phi3_long", "olmo2", "gemma3", "gpt2", "gptj", "falcon_new", "granite"])
def test_an_imported_model_equals_the_original_again(family, tmp_path, tokenizer):
    """From transformers to t2r and back: the logits are those that the original library gave."""
    model, _ = load_imported(FOLDER / family)
    theirs, _ = exported(tmp_path / "out", LoadedModel(model, tokenizer, {"history": []}))
    reference = np.load(FOLDER / family / "reference.npz")
    with torch.no_grad():
        logits = theirs(torch.tensor(reference["input_ids"]).long()).logits
    assert largest_difference(logits, reference["logits"], np.ones(reference["input_ids"].shape, bool)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged", "windowed"])
def test_beam_search_and_sampling_reorder_the_state(kind, tmp_path, tokenizer):
    """With the cache transformers finds what it finds without one, where every step reads the whole sequence anew."""
    theirs, _ = exported(tmp_path / "out", LoadedModel(make_model(LANGUAGE_MODELS[kind]), tokenizer, {"history": []}))
    tokens, mask = padded_left([6, 3], 6)
    inputs = dict(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long(), max_new_tokens=15)
    for options in (
        dict(num_beams=4, do_sample=False, num_return_sequences=3),
        dict(do_sample=True, top_k=20, num_return_sequences=2),
    ):
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            outputs.append(theirs.generate(**inputs, **options, use_cache=use_cache))
        assert torch.equal(*outputs)


TRANSLATORS = {
    "t2r": micro_mt(vocab_size=340, attention=(T2R,), cross_attention=(T2R,), tied_output=False, output_bias=True),
    "hybrid": micro_mt(
        vocab_size=340, attention=(spec("windowed", "t2r", **WINDOW), SOFTMAX), cross_attention=(SOFTMAX, MERGED),
        shared_embedding=False, source_vocab_size=340, positions="learned", max_positions=60, norm_placement="before",
        final_norm=True, output_bias=True,
    ),
    "rotary": micro_mt(
        vocab_size=340, attention=(spec("linear", "performer"),), cross_attention=(spec("linear", "performer"),),
        positions="rotary", query_norm=True, norm="rms", kv_heads=1, output_bias=True,
    ),
}  # fmt: skip

# A seed, and a bias of the stop token, with which beam search ends.
STOPS = {"t2r": (1, 2.5), "hybrid": (1, 0.5), "rotary": (0, 1.0)}


def that_stops(model, stop: int, bias: float):
    """The model, in which the stop token is likelier."""
    arrays = arrays_of(model)
    return with_arrays(model, arrays | {"embedding.bias": arrays["embedding.bias"].at[stop].add(bias)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSLATORS)
def test_a_translation_model_equals_the_original(kind, tmp_path, saved_translator):
    """Logits, and the translations of greedy and of beam search, token by token."""
    pair = model_dir.load(saved_translator).tokenizer
    seed, bias = STOPS[kind]
    model, stop = that_stops(make_model(TRANSLATORS[kind], seed), pair.target.stop, bias), pair.target.stop
    theirs, tokens_of = exported(tmp_path / "out", LoadedModel(model, pair, {"history": []}))
    lines = ["seventy two", "nine hundred and four thousand one"]
    batch = tokens_of(lines, return_tensors="pt", padding=True)
    encoded = [pair.encode_source(line) for line in lines]
    assert [row[: len(ids)] for row, ids in zip(batch.input_ids.tolist(), encoded)] == encoded
    sources = pad_sequences(encoded, 2, batch.input_ids.shape[1])
    target = np.random.default_rng(0).integers(4, 340, (2, 20))
    ours = jax.jit(lambda target, sources: model.logits(model(target, source=source_states(model, sources))[0]))
    with torch.no_grad():
        logits = theirs(**batch, decoder_input_ids=torch.tensor(target)).logits
    assert largest_difference(logits, ours(target, sources), np.ones(target.shape, bool)) < 1e-4
    assert (sources == PADDING).any()
    for size in (1, 4):
        options = dict(end=stop, start=pair.target.start, limits=[40, 40])
        found = beam.translate(model, sources, beam=Beam(size, 0.6), **options)
        output = theirs.generate(**batch, num_beams=size, max_new_tokens=41, length_penalty=0.6, do_sample=False)
        rows = [row[: row.index(stop)] if stop in row else row[:40] for row in output[:, 1:].tolist()]
        assert rows == [hypotheses[0].tokens for hypotheses in found]
    assert len({tuple(row) for row in rows}) == 2 and max(map(len, rows)) < 40, "both searches have ended"


@pytest.mark.slow
def test_the_state_keeps_its_size_over_thousands_of_tokens(tmp_path, tokenizer):
    config = micro(**PLAIN, attention=(MERGED, spec("windowed", "t2r", **WINDOW)))
    theirs, _ = exported(tmp_path / "out", LoadedModel(make_model(config), tokenizer, {"history": []}))
    token, cache, sizes = torch.tensor([[5]]), None, set()
    with torch.inference_mode():
        for _ in range(2000):
            out = theirs(token, past_key_values=cache)
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            sizes.add(cache.state_bytes())
    heads, features, head_dim, slots = 2, 8, 16, 4
    linear = 4 * heads * (features * head_dim + features + 1)
    assert sizes == {2 * linear + 4 * heads * 2 * slots * head_dim + 8}
    assert cache.get_seq_length() == 2000 and bool(out.logits.isfinite().all())


@pytest.mark.slow
def test_labels_positions_and_types(tmp_path, tokenizer):
    """The loss is the mean of -log p; tokens beyond the positions are an error; bfloat16 weights are half the size."""
    model = make_model(micro(**PLAIN, positions="learned", max_positions=12, attention=(MERGED,)))
    content = LoadedModel(model, tokenizer, {"history": []})
    theirs, _ = exported(tmp_path / "out", content)
    ids = torch.tensor(np.random.default_rng(0).integers(4, 300, (2, 12)))
    out = theirs(ids, labels=ids)
    log_probs = out.logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    assert abs(float(out.loss) + float(log_probs.mean())) < 1e-5
    with pytest.raises(ValueError, match="13 tokens are too many: this model has 12 positions"):
        theirs(ids[:, :1], past_key_values=out.past_key_values)
    hugging_face.save(tmp_path / "half", content, dtype="bfloat16")
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 0.6 * (
        tmp_path / "out" / "model.safetensors"
    ).stat().st_size
    half, _ = load(tmp_path / "half")
    assert half.dtype == torch.bfloat16 and float((half(ids).logits - out.logits).abs().mean()) < 0.05


@pytest.mark.slow
def test_a_model_may_be_loaded_again_and_refuses_what_it_would_ignore(tmp_path, tokenizer):
    folder, model = tmp_path / "out", make_model(LANGUAGE_MODELS["merged"])
    theirs, _ = exported(folder, LoadedModel(model, tokenizer, {"history": []}))
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = theirs.generate(ids, max_new_tokens=4, do_sample=False)
    again, _ = load(folder)
    assert again.generate(ids, max_new_tokens=4, do_sample=False).tolist() == expected.tolist()
    assert len(again(ids, return_dict=False)) == 2
    assert again(ids, position_ids=torch.arange(4)[None]).logits.shape[1] == 4
    for wrong in (
        dict(position_ids=torch.arange(4)[None] + 7),
        dict(output_hidden_states=True),
        dict(output_attentions=True),
        dict(past_key_values=transformers.DynamicCache()),
        dict(attention_mask=torch.ones(1, 1, 4, 4)),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            again(ids, **wrong)


def test_the_code_needs_neither_t2r_nor_jax():
    for path in hugging_face.CODE.glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {
            name
            for node in nodes
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module])
        }
        roots = {name.partition(".")[0] for name in names}
        own = {"configuration_t2r", "tokenizer_sentencepiece"}  # the latter is replaced by the tokenizer's code
        assert roots <= {"torch", "transformers", "math", "types", "typing", "json", "shutil", "pathlib", *own}


def pieces_of(text: str) -> Pieces:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,  # how many pieces so little text has depends on the library's version
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = ["</s>", "<unk>", *(processor.id_to_piece(i) for i in range(3, processor.get_piece_size())), "<pad>"]
    return Pieces(model.getvalue(), {name: i for i, name in enumerate(names)})


def hub_of(template: str, **ids) -> Hub:
    library = pytest.importorskip("tokenizers")
    tokens = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer, tokens.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "en_XX", "de_DE"]
    trainer = library.trainers.BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    tokens.train_from_iterator([PROSE], trainer)
    named = [(name, i) for i, name in enumerate(special)]
    tokens.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=named)
    return Hub(tokens.to_str(), **ids)


def tokenizers_of_all_kinds(trained: SentencePiece) -> list:
    german = hub_of("en_XX $A </s>", begin=None, stop=2, start=2, second=4, language=5, padding=1)
    subwords = FairseqSubwords(SUBWORDS, NEW_CODES)
    return [
        trained,
        SentencePiece(trained._model, begin=1),
        Words.train(PROSE, 50),
        FairseqWords([*SPECIAL, "fox", "lazy"]),
        subwords,
        hub_of("<s> $A", begin=0, stop=2, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
        hub_of("$A", begin=None, stop=2, other_stops=[3]),
        TokenizerPair(german, german),
        TokenizerPair(subwords, FairseqSubwords(SUBWORDS[:-1], NEW_CODES)),
        TokenizerPair(pieces_of(PROSE), pieces_of(PROSE[: len(PROSE) // 2])),
        TokenizerPair(trained, trained),
    ]


def test_every_tokenizer_gives_the_same_tokens_and_texts(tmp_path, tokenizer):
    """Language models' with what must precede a text, translation models' with what is around a source."""
    cases, kinds = tokenizers_of_all_kinds(tokenizer), set()
    texts = ["The lazy fox counts two low  boats", "lower é\nfox </s> lazy"]
    for number, ours in enumerate(cases):
        folder, pair = tmp_path / f"{number}", isinstance(ours, TokenizerPair)
        folder.mkdir()
        source, target = ours if pair else (ours, ours)
        make = micro_mt if pair else micro
        sizes = dict(vocab_size=target.vocab_size + 3) | (
            dict(source_vocab_size=source.vocab_size + 3, shared_embedding=False) if pair else dict(adaptive_cutoffs=())
        )
        config = make(**sizes)
        hugging_face._write_json(folder / "config.json", hugging_face.config_json(config, ours, "float32"))
        hugging_face.save_tokenizer(folder, config, ours)
        shutil.copy(hugging_face.CODE / "configuration_t2r.py", folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        for text in texts:
            expected = ours.encode_source(text) if pair else prompt_ids(ours, ours.encode(text))
            assert theirs(text).input_ids == expected
            ids = [i for i in target.encode(text) if i not in theirs.all_special_ids]
            assert theirs.decode(ids, skip_special_tokens=True) == target.decode(ids)
        if isinstance(target, Words):  # whose end token is a line end
            assert theirs.decode([*ids, target.end, *ids], skip_special_tokens=True).count("\n") == 1
        else:
            assert theirs.decode(theirs.eos_token_id) == theirs.eos_token
            assert theirs.decode([*ids, target.stop], skip_special_tokens=True) == target.decode(ids)
        if pair and target.kind != "hub":
            assert theirs(text_target=texts[0]).input_ids == [*target.encode(texts[0]), target.stop]
        batch = theirs([*texts, "fox"], padding=True)
        assert len({len(row) for row in batch.input_ids}) == 1
        assert 0 in batch.attention_mask[2] and batch.attention_mask[2][-1] == (not pair), "on the left, or at the end"
        if getattr(target, "chat_template", None):
            assert theirs.apply_chat_template([dict(role="user", content="Hi")], tokenize=False) == "Hi"
        theirs.save_pretrained(folder / "again")
        kinds.add(target.kind)
    assert kinds == {kind.kind for kind in KINDS}


def test_a_card_says_what_was_not_done(tokenizer):
    plain = LoadedModel(make_model(LANGUAGE_MODELS["softmax"]), tokenizer, {"history": [{"action": "train"}]})
    card = model_card.write("plain", plain)
    assert "it is a transformer, which was not converted" in card and "- rnn" not in card and "recurrence" not in card
    history = [{"action": "train"}, {"action": "swap"}, {"action": "merge"}]
    swapped = LoadedModel(make_model(LANGUAGE_MODELS["merged"]), tokenizer, {"history": history})
    assert "**not finetuned**" in model_card.write("swapped", swapped)
    finetuned = swapped._replace(provenance={"history": [*history, {"action": "train"}]})
    assert "not finetuned" not in model_card.write("finetuned", finetuned)


def test_the_command_writes_a_model_card(tmp_path, tokenizer, call):
    history = [
        {"action": "import", "source": "org/small", "commit": "1" * 40},
        {"action": "convert", "source": str(tmp_path / "secret" / "model"), "feature_map": "t2r", "keep": "1"},
        {"action": "train", "config": {"steps": 2000, "data": {"source": f"text:{tmp_path}/my.txt"}}},
    ]
    model = make_model(micro(**PLAIN, attention=(MERGED, SOFTMAX)))
    model_dir.save(tmp_path / "rnn", LoadedModel(model, tokenizer, {"history": history}))
    (tmp_path / "rnn.run").mkdir()
    scores = {"transformer": {"perplexity": 12.3456}, "converted": {"perplexity": 13.5, "recall": None}}
    report = {"held_out": f"text:{tmp_path}/my.txt", "scores": scores}
    (tmp_path / "rnn.run" / "report.json").write_text(json.dumps(report))
    command = ["export", "--format=huggingface", f"--model={tmp_path}/rnn"]
    status, result = call(*command, f"--output={tmp_path}/out")
    assert status == 0, result
    assert result["files"].keys() == {path.name for path in (tmp_path / "out").iterdir()}
    card = (tmp_path / "out" / "README.md").read_text()
    front = card.split("---\n")[1]
    assert "library_name: transformers" in front and 'base_model: "org/small"' in front
    assert "text-generation" in front and str(tmp_path) not in card
    assert "| 0 | merged | t2r | 8 | none |" in card and "| 1 | softmax |  |  | all |" in card
    assert "| converted | 13.5 |" in card and "| transformer | 12.35 |" in card and "2,000 steps" in card
    assert "Layers 1 have softmax attention" in card and "trust_remote_code=True" in card
    (tmp_path / "rnn.run" / "report.json").write_text("[]")
    for flags, message in (
        ([f"--output={tmp_path}/other"], "a JSON object is needed"),
        ([f"--output={tmp_path}/out"], "exists already"),
        (
            [f"--output={tmp_path}/other", "--capacity=9"],
            "--capacity: with --format=huggingface there is no such limit",
        ),
        ([f"--output={tmp_path}/other", "--format=onnx"], "--format"),
    ):
        status, printed = call(*command, *flags)
        assert status == 2 and message in printed, printed
    assert not (tmp_path / "other").exists()
