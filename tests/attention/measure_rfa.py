"""How near RFA's attention is to softmax before any finetuning, by σ and by the number of random directions.

    python tests/attention/measure_rfa.py results/rfa.json

On the built-in language model: the attention of the last token of some windows of 512, of every head. Random features
of unit queries and keys are computed from their definition, with several draws, and so is the kernel that they
approximate, exp(σ² q̂·k̂). The result is explained in results/NOTES.md.
"""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import t2r
from t2r.analysis.inputs import inputs_on
from t2r.attention.feature_map import Rfa, rfa_scale
from t2r.data.prepared import tokenize
from t2r.data.sources import load_documents
from t2r.environment import describe

WINDOWS, LENGTH, DRAWS = 12, 512, 4
SIGMAS, DIRECTIONS = (1.0, 1.5, 2.0, 3.2), (16, 64, 256)


def unit(x: np.ndarray) -> np.ndarray:
    return x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-3)


def kernel_weights(q: np.ndarray, k: np.ndarray, sigma: float) -> np.ndarray:
    logits = sigma**2 * np.einsum("bhd,bnhd->bhn", q, k)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def waves(x: np.ndarray, directions: np.ndarray) -> np.ndarray:
    angles = np.einsum("b...hd,hkd->b...hk", x, directions)
    return rfa_scale(directions.shape[1]) * np.concatenate([np.sin(angles), np.cos(angles)], -1)


def measure(heads: list[tuple], sigma: float, count: int, chance: np.random.Generator) -> dict[str, float]:
    """Means over draws, layers, heads and windows of random features with `count` directions."""
    distances, negative, clamped = [], [], []
    for q, k, softmax in heads * DRAWS:
        directions = sigma * chance.standard_normal((q.shape[1], count, q.shape[2])).astype(np.float32)
        similarity = np.einsum("bhk,bnhk->bhn", waves(q, directions), waves(k, directions))
        total = similarity.sum(-1, keepdims=True)
        weights = similarity / np.maximum(total, Rfa.normalizer.value)
        distances.append(np.linalg.norm(weights - softmax, axis=-1).mean())
        negative.append((similarity < 0).mean())
        clamped.append((total < Rfa.normalizer.value).mean())
    means = [float(np.mean(values)) for values in (distances, negative, clamped)]
    return dict(zip(("distance", "negative", "clamped"), means))


def main(output: str) -> None:
    loaded = t2r.load("builtin:tiny_lm")
    text = tokenize(loaded.tokenizer, load_documents("builtin:pydoc", "valid"))[: WINDOWS * LENGTH]
    tokens = jnp.asarray(text.reshape(WINDOWS, LENGTH))
    heads, norms = [], []
    for inputs in inputs_on(loaded.model, tokens, jnp.ones(tokens.shape, bool)):
        attention = inputs.attention
        q = np.asarray(attention.queries(inputs.x, inputs.positions))[:, -1, :, 0]
        k = np.asarray(attention.keys(inputs.x, inputs.positions))
        heads.append((unit(q), unit(k), np.asarray(inputs.weights())[:, :, -1]))
        lengths = [np.linalg.norm(x, axis=-1) for x in (q, k)]
        norms.append((lengths[0].mean(0) * lengths[1].mean((0, 1)) / q.shape[-1] ** 0.5).tolist())
    chance, rows = np.random.default_rng(0), []
    for sigma in SIGMAS:
        exact = np.mean([np.linalg.norm(kernel_weights(q, k, sigma) - w, axis=-1).mean() for q, k, w in heads])
        for count in DIRECTIONS:
            rows.append({"sigma": sigma, "directions": count, "kernel_distance": float(exact)})
            rows[-1] |= measure(heads, sigma, count, chance)
            print(json.dumps(rows[-1]), flush=True)
    uniform = np.mean([np.linalg.norm(w - 1 / LENGTH, axis=-1).mean() for *_, w in heads])
    content = {"command": "python tests/attention/measure_rfa.py results/rfa.json", "model": "builtin:tiny_lm"}
    content |= {"windows": WINDOWS, "length": LENGTH, "draws": DRAWS, "uniform_distance": float(uniform)}
    content |= {"norm_products_over_sqrt_d": norms, "rows": rows, "environment": describe()}
    Path(output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
