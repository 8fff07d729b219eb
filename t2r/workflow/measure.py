"""What the report of a conversion shows: scores, texts, decoding speed, and what became of each attention."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from t2r.batch import Batch, pad_sequences
from t2r.benchmark.floor import measure_machine, measured_crossover, predicted_crossover
from t2r.benchmark.shared import is_out_of_memory
from t2r.benchmark.steps import Decoder
from t2r.console import say
from t2r.data.pairs import load_pairs
from t2r.decode.sampling import Sampling
from t2r.decode.text import generate_text
from t2r.decode.translator import translate_lines
from t2r.evaluation.features import FeatureUse, feature_use
from t2r.evaluation.recall import recall
from t2r.evaluation.samples import PROMPT as SAMPLE_PROMPT
from t2r.evaluation.samples import score_samples
from t2r.evaluation.score import evaluate_pairs
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.model.transformer import LanguageModel
from t2r.store.model_dir import LoadedModel
from t2r.training.metrics import read_metrics
from t2r.training.task import corpora, make_task, splits

RECALL = 512  # tokens of a sequence whose second half repeats the first
SENTENCES = 200  # translated for BLEU
PROMPT, TEXT = 16, 100  # tokens of a prompt that is taken from the held-out text, and of its continuation
SOURCES = 3  # translated for the page
BATCH, STEPS = 16, 32  # sequences decoded at a time, and how many steps are timed
SAMPLES = 32  # texts that a model writes, to be scored by the transformer
LOOKED_AT = 8  # sequences from which dead features are counted


class HeldOut:
    """The part of a run's data on which it validates: never trained on, and nothing is chosen by it."""

    def __init__(self, config: ConfigDict, folder: Path, prompts: Sequence[str] = ()):
        self._config, self._folder, self._prompts = config, folder, list(prompts)

    def measure(self, loaded: LoadedModel) -> dict[str, Any]:
        """{"scores": measure → value, "texts": what the model writes after each prompt, or how it translates}."""
        task = make_task(self._config, self._folder, loaded.model, loaded.tokenizer, 1)
        scores = {"perplexity": task.validate(loaded.model)}
        if not loaded.model.config.encoder_layers:
            tokens = self._tokens(loaded)
            length = min(RECALL, loaded.model.config.max_positions or RECALL, 2 * len(tokens))
            scores[f"recall_{length}"] = recall(loaded.model, tokens, length=length)
            return {"scores": scores, "texts": self._continuations(loaded, tokens)}
        result = evaluate_pairs(loaded, *splits(self._config)[1], beam=1, first=SENTENCES)
        scores |= {name: result[name] for name in ("bleu", "chrf", "sentences")}
        return {"scores": scores, "texts": self._translations(loaded)}

    def samples(self, loaded: LoadedModel, transformer: LoadedModel) -> dict[str, float]:
        """How the transformer finds what a language model writes, in texts as long as a training sequence."""
        length, positions = self._config.data.length, loaded.model.config.max_positions
        tokens = self._tokens(loaded)
        prompt = min(SAMPLE_PROMPT, length // 2, len(tokens))
        length = min(length, positions - prompt - 1) if positions else length
        return score_samples(loaded, tokens, SAMPLES, scorer=transformer, length=length, prompt=prompt, quiet=True)

    def batch(self, loaded: LoadedModel) -> Batch:
        """Some held-out sequences."""
        length = self._config.data.length
        if not loaded.model.config.encoder_layers:
            tokens = self._tokens(loaded)[: LOOKED_AT * (length + 1)]
            pieces = [tokens[first : first + length + 1] for first in range(0, len(tokens), length + 1)]
            return Batch(pad_sequences(pieces, len(pieces), length + 1))
        encode, pairs = loaded.tokenizer, self._pairs(LOOKED_AT)
        sources = [encode.encode_source(source)[:length] for source, _ in pairs]
        targets = [encode.encode_target(target)[:length] for _, target in pairs]
        padded = [pad_sequences(side, len(side), max(map(len, side))) for side in (targets, sources)]
        return Batch(*padded)

    def _tokens(self, loaded: LoadedModel) -> np.ndarray:
        return corpora(self._config, self._folder, loaded.tokenizer)[1][0]

    def _pairs(self, count: int) -> list[tuple[str, str]]:
        return list(itertools.islice(load_pairs(*splits(self._config)[1]), count))

    def _continuations(self, loaded: LoadedModel, tokens: np.ndarray) -> list[dict[str, str]]:
        prompts = self._prompts or [loaded.tokenizer.decode(tokens[:PROMPT].tolist())]
        positions = loaded.model.config.max_positions
        longest = max(len(loaded.tokenizer.encode(prompt)) for prompt in prompts) + 1
        length = max(1, min(TEXT, positions - longest)) if positions else TEXT
        texts = generate_text(loaded, prompts, length, sampling=Sampling(0.8, top_p=0.95)).texts
        return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts)]

    def _translations(self, loaded: LoadedModel) -> list[dict[str, str]]:
        sources = self._prompts or [source for source, _ in self._pairs(SOURCES)]
        texts = [translations[0].text for translations in translate_lines(loaded, sources)]
        return [{"prompt": source, "text": text} for source, text in zip(sources, texts)]


def decoding(transformer: LanguageModel, rnn: LanguageModel, lengths: Sequence[int]) -> dict[str, Any]:
    """Decoding speed and state of both models, and from which length the RNN is faster: predicted and measured.

    Lengths beyond the learned positions of the models, or that do not fit in memory, are left out, with the reason.
    """
    decoders = Decoder(transformer, repeat_for=1.0), Decoder(rnn, repeat_for=1.0)
    positions, runs, left_out = transformer.config.max_positions, [], {}
    for length in lengths:
        if positions and length > positions:
            left_out[length] = f"the models have {positions} positions"
            continue
        try:  # both at one length, so that other load on the machine affects both
            pair = [decoder.steps(BATCH, length, STEPS) for decoder in decoders]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            left_out[length] = "its state does not fit in memory"
            continue
        runs.append(pair)
        slow, fast = (f"{speed.tokens_per_second:,.0f}" for speed in pair)
        say(f"     {length} tokens: transformer {slow} tokens/s, RNN {fast}")
    machine, bandwidth = measure_machine()
    seconds = [{pair[i].length: pair[i].step_seconds for pair in runs} for i in (0, 1)]
    return {
        "transformer": [pair[0]._asdict() for pair in runs],
        "rnn": [pair[1]._asdict() for pair in runs],
        "dtype": rnn.config.dtype,
        "left_out": left_out,
        "bandwidth": bandwidth,
        "predicted_crossover": predicted_crossover(transformer, rnn, BATCH, machine),
        "measured_crossover": measured_crossover(*seconds),
    }


def attentions(loaded: LoadedModel, batch: Batch, run: Path, damage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What is known of each attention of the decoder, causal and cross; None is what was not measured.

    `loaded` is the trained model before it is merged, `run` the work directory of its training.
    """
    used, distances = feature_use(loaded.model, batch), last_distances(run)
    return [
        {
            "name": name,
            "attention": spec.kind,
            "exact_for": spec.exact_for,
            "damage": damage and damage["scores"].get(name),
            "distance": distances.get(name),
            **(used[name]._asdict() if name in used else dict.fromkeys(FeatureUse._fields)),
        }
        for name, spec in named_specs(loaded.model.config)
    ]


def named_specs(config: ModelConfig) -> list[tuple[str, AttentionSpec]]:
    """Each attention of the decoder by its name, such as `3.cross`, layer by layer."""
    named = [(f"{layer}.attention", spec) for layer, spec in enumerate(config.attention)]
    named += [(f"{layer}.cross", spec) for layer, spec in enumerate(config.cross_attention)]
    return sorted(named, key=lambda item: int(item[0].split(".")[0]))


def last_distances(run: Path) -> dict[str, float]:
    """By attention, the last distance from the transformer's that attention transfer logged; {} without a transfer."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "distance" in line]
    prefix = "distance."
    return {name.removeprefix(prefix): value for name, value in lines[-1].items() if prefix in name} if lines else {}


def validation_curve(run: Path) -> dict[int, float]:
    """step → perplexity of the held-out data, from the metrics of a run."""
    lines = read_metrics(run / "metrics.jsonl")
    return {line["step"]: line["valid_perplexity"] for line in lines if "valid_perplexity" in line}
