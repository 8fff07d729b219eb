"""Which attention a model cannot do without: the damage done by reducing each one alone, without any training.

Causal attention is reduced to a window and the first tokens; cross attention to the mean over the source. A language
model is then scored by its recall (`t2r.evaluation.recall`), a translation model by the perplexity of its own greedy
translations. The attention that does most damage is the one to keep as softmax: `keep=auto:N`.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from t2r.attention.module import SoftmaxAttention
from t2r.batch import PADDING, Batch, inputs_and_targets, pad_sequences
from t2r.console import Progress
from t2r.conversion.swap import linearize
from t2r.data.pairs import is_pairs, load_pairs
from t2r.data.prepared import tokenize
from t2r.data.sources import load_documents
from t2r.data.tokenizer import decoder_start_ids
from t2r.decode.beam import default_limit
from t2r.decode.generate import generate_tokens, prefill_translation
from t2r.decode.translator import pad
from t2r.errors import InputError
from t2r.evaluation.recall import repeated
from t2r.evaluation.score import default_split
from t2r.model.config import AttentionSpec
from t2r.model.transformer import Block, LanguageModel, check_length
from t2r.store.model_dir import LoadedModel

WINDOW, SINKS = 32, 4  # what causal attention is reduced to, if the conversion has no window of its own
SEQUENCES, SOURCES = 16, 96  # on which language models and translation models are measured
NO_DISTANT_TOKENS = -1e9  # the mixture's bias with which windowed attention has its window alone


class Damage(NamedTuple):
    """The scores (perplexities: lower is better) of a model whose attention is reduced, one at a time."""

    base: float  # of the whole model
    scores: dict[str, float]  # by attention: `3.attention`, `3.cross`; of one key/value head: `3.attention.0`
    seconds: float

    def layers(self, name: str = "attention") -> dict[int, float]:
        """The scores of causal attention, or of `cross`, by layer."""
        return {int(key.split(".")[0]): score for key, score in self.scores.items() if key.endswith(f".{name}")}

    def worst(self, count: int, name: str = "attention") -> list[int]:
        """The layers whose attention does most damage, in order of layers."""
        layers = self.layers(name)
        return sorted(sorted(layers, key=lambda layer: -layers[layer])[:count])

    def above(self, percent: float, name: str = "attention") -> list[int]:
        """The layers whose attention does more damage than this, in percent of the whole model's score."""
        return sorted(layer for layer, score in self.layers(name).items() if score > self.base * (1 + percent / 100))


def measure_damage(
    model: LanguageModel,
    batches: Sequence[Batch],
    *,
    window: int = 0,
    sinks: int | None = None,
    heads: bool = False,
    quiet: bool = False,
) -> Damage:
    """Reduces each softmax attention of the decoder alone. For language models `batches` repeat: see `repeated`.

    With `heads`, each key/value head of causal attention alone, too.
    """
    began = time.perf_counter()
    reduced = list(_reductions(model, window or WINDOW, SINKS if sinks is None else sinks, heads))
    if not reduced:
        raise InputError("the model has no softmax attention left: damage is measured before a conversion")
    sums = {name: 0.0 for name in ("", *(name for _, name, _ in reduced))}
    tokens = 0
    with Progress("damage", len(batches) * len(reduced), quiet=quiet) as progress:
        for batch in batches:
            run = _Run(model, batch)
            tokens += run.tokens
            sums[""] += run.loss(len(model.blocks))
            for layer, name, block in reduced:
                sums[name] += run.loss(layer, block)
                progress.advance()
    scores = {name: math.exp(min(total / tokens, 700)) for name, total in sums.items()}
    return Damage(scores.pop(""), scores, round(time.perf_counter() - began, 1))


def damage_on_text(
    model: LanguageModel,
    tokens: np.ndarray,
    *,
    length: int = 512,
    sequences: int = SEQUENCES,
    batch: int = 4,
    **options: Any,
) -> Damage:
    """The damage to a language model's recall of pieces of a text; `options` are those of `measure_damage`."""
    check_length(model.config, length)
    window = options.get("window") or WINDOW
    if window >= length:
        raise InputError(
            f"a window of {window} tokens leaves nothing of a sequence of {length} out, so no attention is reduced: "
            "choose a smaller window or longer sequences"
        )
    repeating = repeated(tokens, length, sequences)
    parts = [repeating[first : first + batch] for first in range(0, len(repeating), batch)]
    return measure_damage(model, [Batch(part) for part in parts], **options)


def damage_on_sources(
    loaded: LoadedModel, sources: Sequence[str], *, length: int = 128, batch: int = 32, **options: Any
) -> Damage:
    """The damage to a translation model's own greedy translations of these sources (those of up to `length` tokens)."""
    model, tokenizer, _ = loaded
    target, start = tokenizer.target, decoder_start_ids(tokenizer.target)
    encoded = sorted((ids for ids in map(tokenizer.encode_source, sources) if len(ids) <= length), key=len)
    if not encoded:
        raise InputError(f"none of {len(sources)} sources has at most {length} tokens: give shorter ones")
    batches = []
    for first in range(0, len(encoded), batch):
        padded = pad(encoded[first : first + batch], len(encoded[first : first + batch]))
        most = min(default_limit(padded.shape[1]), length)
        generation = prefill_translation(model, padded, most, start=start)
        _, outputs = generate_tokens(model, generation, most, end=target.stop)
        translations = [[*start, *ids, *([target.stop] if len(ids) < most else [])] for ids in outputs]
        batches.append(Batch(pad_sequences(translations, len(padded), max(map(len, translations))), padded))
    return measure_damage(model, batches, **options)


def measure_on_data(
    loaded: LoadedModel,
    data: str,
    split: str | None = None,
    *,
    length: int | None = None,
    sequences: int | None = None,
    **options: Any,
) -> Damage:
    """The damage on data such as `text:FILE`, or on the sources of pairs; `options` are those of `measure_damage`."""
    translates, split = bool(loaded.model.config.encoder_layers), split or default_split(data)
    if is_pairs(data) != translates:
        needed = "sentence pairs" if translates else "text"
        raise InputError(f"--data={data}: a {'translation' if translates else 'language'} model needs {needed}")
    if translates:
        sources = [source for source, _ in itertools.islice(load_pairs(data, split), sequences or SOURCES)]
        return damage_on_sources(loaded, sources, length=length or 128, **options)
    tokens = tokenize(loaded.tokenizer, load_documents(data, split))
    return damage_on_text(loaded.model, tokens, length=length or 512, sequences=sequences or SEQUENCES, **options)


def _reductions(model: LanguageModel, window: int, sinks: int, heads: bool = False) -> Iterator[tuple[int, str, Block]]:
    """(layer, name of the attention, the layer's block with that attention reduced)."""
    for layer, block in enumerate(model.blocks):
        for name in ("attention", "cross"):
            attention = getattr(block, name, None)
            if not isinstance(attention, SoftmaxAttention):
                continue
            reduced = _window_alone(attention, window, sinks) if name == "attention" else _mean_of_source(attention)
            yield layer, f"{layer}.{name}", _with(block, name, reduced)
            if heads and name == "attention":
                for head in range(attention.shape.kv_heads):
                    one = OneHeadReduced(attention, reduced, head)
                    yield layer, f"{layer}.{name}.{head}", _with(block, name, one)


def _with(block: Block, name: str, attention: nnx.Module) -> Block:
    changed = nnx.merge(*nnx.split(block))  # a new object that shares the arrays
    setattr(changed, name, attention)
    return changed


class OneHeadReduced(nnx.Module):
    """Attention with one key/value head, and the query heads that read it, reduced.

    An output is a sum over heads, so that one of them can be taken from it and another added.
    """

    def __init__(self, attention: SoftmaxAttention, reduced: nnx.Module, head: int):
        self.attention = attention
        self.before, self.after = _one_head(attention, head), _one_head(reduced, head)

    def __call__(self, x: Float[Array, "b n width"], **options: Any) -> tuple[Float[Array, "b n width"], Any]:
        out, state = self.attention(x, **options)
        return out - self.before(x, **options)[0] + self.after(x, **options)[0], state


def _one_head(attention: nnx.Module, head: int) -> nnx.Module:
    """The attention with the output of one key/value head alone."""
    alone, shape = nnx.merge(*nnx.split(attention)), attention.shape
    chosen = jnp.arange(shape.heads) // (shape.heads // shape.kv_heads) == head
    alone.out.kernel = nnx.Param(jnp.where(chosen[:, None, None], alone.out.kernel[...], 0))
    if alone.out.bias is not None:
        alone.out.bias = nnx.Param(jnp.zeros_like(alone.out.bias[...]))
    return alone


def _window_alone(attention: SoftmaxAttention, window: int, sinks: int) -> nnx.Module:
    spec = AttentionSpec("windowed", "t2r", 1, window=window, sinks=sinks)
    reduced = linearize(attention, spec, rngs=nnx.Rngs(0))
    reduced.mixture.bias = nnx.Param(jnp.full(reduced.mixture.bias.shape, NO_DISTANT_TOKENS))
    return reduced


def _mean_of_source(attention: SoftmaxAttention) -> nnx.Module:
    reduced = linearize(attention, AttentionSpec("linear", "t2r", 1), rngs=nnx.Rngs(0))
    phi = reduced.feature_map  # φ = 1 for all queries and keys
    phi.weight, phi.bias = nnx.Param(jnp.zeros(phi.weight.shape)), nnx.Param(jnp.ones(phi.bias.shape))
    return reduced


class _Run:
    """The layers' inputs for one batch, from which the model runs on with one layer changed."""

    def __init__(self, model: LanguageModel, batch: Batch):
        self._blocks = [nnx.split(block) for block in model.blocks]
        self._rest = nnx.split(model)
        tokens, targets = inputs_and_targets(jax.tree.map(jnp.asarray, batch))
        self._targets = targets
        counted = _counted(np.asarray(targets), translates=batch.source is not None)
        self._counted, self.tokens = jnp.asarray(counted), int(counted.sum())
        self._source = _encode(*self._rest, batch.source) if batch.source is not None else None
        x = _embed(*self._rest, tokens)
        self._inputs = [x]
        for block in self._blocks:
            self._inputs.append(_block(*block, self._inputs[-1], self._source))

    def loss(self, layer: int, changed: Block | None = None) -> float:
        """The total loss when `changed` replaces the block of a layer."""
        x = self._inputs[layer]
        if changed is not None:
            x = _block(*nnx.split(changed), x, self._source)
            for block in self._blocks[layer + 1 :]:
                x = _block(*block, x, self._source)
        return float(_loss(*self._rest, x, self._targets, self._counted))


def _counted(targets: np.ndarray, *, translates: bool) -> np.ndarray:
    """Which targets count: all of a translation; the second half of a repeating sequence, its first token not."""
    if translates:
        return targets != PADDING
    return np.broadcast_to(np.arange(targets.shape[1]) >= (targets.shape[1] + 1) // 2, targets.shape)


# One compiled program for all layers of one structure.
@functools.partial(jax.jit, static_argnums=0)
def _block(graph: nnx.GraphDef, arrays: nnx.State, x: Array, source: tuple[Array, Array] | None) -> Array:
    block = nnx.merge(graph, arrays)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    state = None if source is None else block.source_state(source[0], mask=source[1])
    return block(x, source=state, positions=positions)[0]


@functools.partial(jax.jit, static_argnums=0)
def _embed(graph: nnx.GraphDef, arrays: nnx.State, tokens: Array) -> Float[Array, "b n width"]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return nnx.merge(graph, arrays).embed(tokens, positions)


@functools.partial(jax.jit, static_argnums=0)
def _encode(graph: nnx.GraphDef, arrays: nnx.State, source: Array) -> tuple[Array, Array]:
    mask = source != PADDING
    return nnx.merge(graph, arrays).encode(jnp.maximum(source, 0), mask), mask


@functools.partial(jax.jit, static_argnums=0)
def _loss(graph: nnx.GraphDef, arrays: nnx.State, x: Array, targets: Array, counted: Array) -> Float[Array, ""]:
    model = nnx.merge(graph, arrays)
    x = x if model.final_norm is None else model.final_norm(x)
    losses = model.embedding.loss(x, jnp.maximum(targets, 0)).astype(jnp.float32)
    return jnp.where(counted, losses, 0).sum()


def reduction_of(plan: dict[str, Any]) -> dict[str, Any]:
    """What attention is reduced to for a conversion with this plan: its own window, if it has one."""
    return dict(window=plan["window"], sinks=plan["sinks"]) if plan.get("window") else {}


def rows(damage: Damage) -> list[tuple[Any, ...]]:
    """For a table: attention, score, percent above the whole model's."""
    return [
        (name, round(score, 3), f"{100 * (score / damage.base - 1):+.1f}%")
        for name, score in sorted(damage.scores.items(), key=lambda item: -item[1])
    ]


def check_plot(path: str | Path) -> None:
    """Raises an error if no plot can be written there: better before the measurement than after it."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"--output={path}: a plot is FILE.png or FILE.svg")
    if not path.parent.is_dir():
        raise InputError(f"--output={path}: there is no directory {path.parent}")
    if path.is_dir():
        raise InputError(f"--output={path} is a folder: give the name of a file")


def plot(damage: Damage, path: str | Path) -> None:
    """Writes `bars` to a file."""
    bars(damage).savefig(path, dpi=150)


def bars(damage: Damage) -> Any:
    """A figure: the score of each attention as a bar, above the line of the whole model's. Heads are not drawn."""
    from matplotlib.figure import Figure

    damage = damage._replace(scores={name: score for name, score in damage.scores.items() if name.count(".") == 1})
    figure = Figure(figsize=(max(6.0, 0.28 * len(damage.scores)), 3.6))
    axes = figure.subplots()
    colors = ["#cc79a7" if name.endswith(".cross") else "#d55e00" for name in damage.scores]
    labels = [name.removesuffix(".attention").replace(".cross", "×") for name in damage.scores]
    axes.bar(range(len(labels)), list(damage.scores.values()), color=colors)
    axes.axhline(damage.base, color="#0072b2", label=f"nothing reduced: {damage.base:.3g}")
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set(xlabel="layer whose attention is reduced (×: cross attention)", ylabel="perplexity", yscale="log")
    axes.legend(fontsize=8, edgecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure
