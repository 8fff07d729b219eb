"""Scores a model on data: perplexity on text, BLEU and chrF on sentence pairs."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t2r.console import Progress
from t2r.data.pairs import is_pairs, load_pairs
from t2r.data.prepared import tokenize
from t2r.data.sources import files_of, load_documents
from t2r.data.tokenizer import Words
from t2r.decode.beam import Beam
from t2r.decode.translator import TranslateOptions, translate_lines
from t2r.errors import InputError
from t2r.evaluation.bleu import check_tokenizer, score_translations, tokenized_bleu
from t2r.evaluation.logits import logits_of
from t2r.evaluation.perplexity import bits_per_byte, document_perplexity, per_word, perplexity
from t2r.evaluation.recall import recall, repeated
from t2r.evaluation.samples import LENGTH, PROMPT, check_samples, pieces, score_samples
from t2r.files import atomic_file, check_output_file, is_same_file, read_arrays
from t2r.store.model_dir import LoadedModel


def evaluate(loaded: LoadedModel, data: str, *, split: str | None = None, **options: Any) -> dict[str, Any]:
    """Scores a model on data such as `text:FILE`; `options` are those of `evaluate_text` or `evaluate_pairs`."""
    translates = bool(loaded.model.config.encoder_layers)
    if is_pairs(data) != translates:
        kinds = ("text", "a language model"), ("sentence pairs", "a translation model")
        raise InputError(f"--data={data} is {kinds[is_pairs(data)][0]}, but the model is {kinds[translates][1]}")
    score = evaluate_pairs if translates else evaluate_text
    return score(loaded, data, split or default_split(data), **options)


def default_split(data: str) -> str:
    """`test` for data with splits of its own, `all` for files."""
    return "test" if data.startswith(("builtin:", "tfds:")) else "all"


def evaluate_text(
    loaded: LoadedModel,
    data: str,
    split: str,
    *,
    documents: bool = False,
    first: int | None = None,
    window: int | None = None,
    batch: int | None = None,
    recall_lengths: Sequence[int] = (),
    samples: int = 0,
    scorer: LoadedModel | None = None,
    sample_length: int = LENGTH,
    sample_prompt: int = PROMPT,
) -> dict[str, Any]:
    """Perplexities of a text, or with `documents` of its documents independently; `first` limits their number.

    `recall_lengths`: the perplexity of repeated text, too, in sequences of each of these lengths.
    `samples`: how `scorer` finds so many texts that the model writes, too; see `score_samples`.
    """
    if documents and (recall_lengths or samples):
        raise InputError(
            "recall and samples are measured on a text, not on its documents one by one: leave out one of the two"
        )
    if samples:
        check_samples(loaded, scorer, length=sample_length, prompt=sample_prompt)
    model, tokenizer, _ = loaded
    texts = load_documents(data, split)[:first]
    options = dict(window=window, batch=batch or 8, start=tokenizer.end)
    if documents:
        scores = document_perplexity(model, [tokenizer.encode(text) for text in texts], **options)
        return {"perplexity": scores.perplexity, "documents": len(texts), "tokens": scores.tokens}
    tokens, text = tokenize(tokenizer, texts), "\n".join(texts)
    for length in recall_lengths:
        repeated(tokens, length, 1)  # refuses one that is too long for the text, before anything is scored
    if samples:
        pieces(tokens, 1, sample_prompt)  # likewise
    scores = perplexity(model, tokens, **options)
    result = {
        "perplexity": scores.perplexity,
        "perplexity_all": scores.perplexity_all,
        "word_perplexity": per_word(scores, text),
        "bits_per_byte": bits_per_byte(scores, text),
        "tokens": scores.tokens,
    }
    for length in recall_lengths:
        result[f"recall_{length}"] = recall(model, tokens, length=length, batch=max(1, 4096 // length))
    if samples:
        written = dict(scorer=scorer, length=sample_length, prompt=sample_prompt)
        result |= {"samples": samples, **score_samples(loaded, tokens, samples, **written)}
    if isinstance(tokenizer, Words):
        # An unknown word is scored as <unk>, so perplexity and bits per byte are too low by an unknown amount.
        result["unknown_words"] = tokenizer.unknown(tokens)
    return result


def evaluate_pairs(
    loaded: LoadedModel,
    data: str,
    split: str,
    *,
    beam: Beam | int = Beam(),
    batch: int | None = None,
    first: int | None = None,
    tokenize: str = "13a",
    moses: str | None = None,
    split_compounds: bool = False,
    output: str | Path | None = None,
) -> dict[str, Any]:
    """BLEU and chrF of the translations of all sources; `output` is a TSV file of source, reference, translation."""
    check_tokenizer(tokenize)
    if output:
        check_output_file(Path(output))
        if any(is_same_file(output, file) for file in files_of(data)):
            raise InputError(f"--output={output} is a file of --data={data}: choose another file")
    beam = Beam(beam) if isinstance(beam, int) else beam
    sources, references = zip(*itertools.islice(load_pairs(data, split), first))
    began = time.perf_counter()
    with Progress("translate", len(sources)) as progress:
        options = TranslateOptions(beam=beam, batch=batch or 32)
        results = translate_lines(loaded, sources, options, warn=progress.say, on_batch=progress.advance)
    best = [translations[0].text for translations in results]
    result = score_translations(best, list(references), tokenize=tokenize)
    if moses:
        result["tokenized_bleu"] = tokenized_bleu(
            best, list(references), language=moses, split_compounds=split_compounds
        )
    if output:
        lines = ("\t".join(columns) + "\n" for columns in zip(sources, references, best))
        with atomic_file(Path(output)) as unfinished:
            unfinished.write_text("".join(lines), "utf-8")
    result |= {"beam": beam.size, "length_penalty": beam.length_penalty, "early_stopping": beam.early_stopping}
    return result | {"seconds": round(time.perf_counter() - began, 1)}


def write_logits(
    loaded: LoadedModel, ids: str | Path, output: str | Path, *, normalised: bool = False
) -> dict[str, Any]:
    """Writes the logits, or log-probabilities, for the ids of an .npz file into another .npz file; see `logits_of`."""
    check_output_file(Path(output))
    name = "log_probs" if normalised else "logits"
    outputs = logits_of(loaded.model, read_arrays(Path(ids)), normalised=normalised)
    with atomic_file(Path(output)) as unfinished, unfinished.open("wb") as file:
        np.savez(file, **{name: outputs})
    return {name: str(output), "shape": list(outputs.shape)}
