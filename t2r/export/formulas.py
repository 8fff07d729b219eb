"""Writes the decoding step of a model as formulas: what another implementation needs beside the arrays."""

import itertools

from t2r.attention.feature_map import FEATURE_MAPS
from t2r.attention.windowed import LARGEST
from t2r.export.names import ranges
from t2r.model.config import AttentionSpec, ModelConfig
from t2r.normalizer import Normalizer

ACTIVATIONS = {
    "relu": "max(a, 0)",
    "gelu": "a · (1 + tanh(√(2/π) · (a + 0.044715 a³))) / 2",
    "gelu_exact": "a · (1 + erf(a / √2)) / 2",
    "swish": "a / (1 + exp(−a))",
}
# φ of a query or key a, with g its key head and d the head size.
FEATURES = {
    "t2r": [
        "φ(q) = max(feature_map.weight[g] · q / √d + feature_map.bias[g], 0)",
        "φ(k) = max(feature_map.weight[g] · k + feature_map.bias[g], 0)",
    ],
    "elu": ["φ(a) = a + 1 where a > 0, exp(a) elsewhere"],
    "rfa": [
        "W = feature_map.pool[0] with columns times feature_map.sigma[g]",
        "φ(a) = 0.8 / √D · [sin(W · â), cos(W · â)], â = a / (‖a‖ + 0.001), where W has D rows",
    ],
    "performer": [
        "e(a) = feature_map.directions[g] · ã − ‖ã‖²/2 − log(features)/2, ã = a / d^¼",
        "φ(q) = exp(e(q) − max e(q)), φ(k) = exp(e(k) − c), where c = log_scale[g] is the largest element of e(k)",
        "over all keys in S and z. If a new one raises it from c to c′, S and z are first multiplied by exp(c − c′)",
    ],
}
FEATURES["hedgehog"] = [
    "e(a) = feature_map.weight[g] · a / d^¼",
    "φ(a) = softmax of [e(a), −e(a)] over its elements",
]
FEATURES["t2r_elu"] = [
    "φ(q) = f(feature_map.weight[g] · q / √d + feature_map.bias[g])",
    "φ(k) = f(feature_map.weight[g] · k + feature_map.bias[g])",
    "f(a) = a + 1 where a > 0, exp(a) elsewhere",
]
FEATURES["rfa_fixed"] = FEATURES["rfa"]  # they differ in training only


def write(config: ModelConfig) -> str:
    """The formulas of the decoding step, as plain text."""
    parts = [_embedding(config), _layers(config), _output(config), _norm(config), _feedforward(config)]
    parts += _attentions(config)
    if config.encoder_layers:
        parts.append(_encoder(config))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _embedding(config: ModelConfig) -> list[str]:
    if config.adaptive_cutoffs:
        bounds = [0, *config.adaptive_cutoffs, config.vocab_size]
        bands = ", ".join(
            f"band {i} has ids {low} to {high - 1}" for i, (low, high) in enumerate(itertools.pairwise(bounds))
        )
        lines = [f"x = embedding.tables[band][id − first id of the band] · embedding.projections[band]   ({bands})"]
    else:
        lines = ["x = embedding.table[id]"]
    if config.scale_embedding:
        lines.append(f"x = x · √{config.width}")
    if config.embedding_multiplier != 1:
        lines.append(f"x = x · {config.embedding_multiplier}")
    if config.positions == "learned":
        lines.append("x = x + positions[position]; the first token has position 0")
    if config.positions.startswith("sinusoidal"):
        half = config.width // 2
        steps = half if config.positions == "sinusoidal_open" else max(half - 1, 1)
        offset = f" + {config.position_offset}" if config.position_offset else ""
        lines += [
            f"x = x + [sin(p · f), cos(p · f)], p = position{offset}, f[i] = 10000^(−i/{steps}), i = 0 … {half - 1}",
            "    the first token has position 0",
        ]
    if config.embedding_norm:
        lines.append("x = norm(x; embedding_norm)")
    return lines


def _layers(config: ModelConfig) -> list[str]:
    branches = ["attention", *(["cross"] if config.encoder_layers else []), "feedforward"]
    lines = [f"for each layer 0 … {config.layers - 1}, with the arrays blocks.{{layer}}.*:"]
    if config.parallel:
        return [*lines, "    x = x + attention(norm(x; attention_norm)) + feedforward(norm(x; feedforward_norm))"]
    return lines + [f"    {_branch(config, name)}" for name in branches]


def _branch(config: ModelConfig, name: str) -> str:
    return {
        "before": f"x = x + {name}(norm(x; {name}_norm))",
        "after": f"x = norm(x + {name}(x); {name}_norm)",
        "both": f"x = x + norm({name}(norm(x; {name}_norm)); {name}_out_norm)",
        "output": f"x = x + norm({name}(x); {name}_norm)",
    }[config.norm_placement]


def _output(config: ModelConfig) -> list[str]:
    lines = ["x = norm(x; final_norm)"] if config.final_norm else []
    if not config.adaptive_cutoffs:
        table, bias = "table" if config.tied_output else "output", " + embedding.bias" if config.output_bias else ""
        return [*lines, f"logits = embedding.{table} · x{bias}"]
    first = config.adaptive_cutoffs[0]
    return [
        *lines,
        "h = log_softmax([embedding.tables.0 · x, x · embedding.classes])",
        f"logits of band 0 = h[0 … {first - 1}]",
        f"logits of band i = h[{first - 1} + i] + log_softmax(embedding.tables.i · (embedding.projections.i · x))",
        "(these logits are log-probabilities)",
    ]


def _norm(config: ModelConfig) -> list[str]:
    if config.norm == "rms":
        return [f"norm(x; n) = x / √(mean(x²) + {config.norm_eps}) · n.scale"]
    return [f"norm(x; n) = (x − mean(x)) / √(variance(x) + {config.norm_eps}) · n.scale + n.bias"]


def _feedforward(config: ModelConfig) -> list[str]:
    def dense(name: str, x: str) -> str:
        return f"({x} · {name}.kernel{f' + {name}.bias' if config.bias else ''})"

    hidden = f"act{dense('up', 'x')}"
    if config.gated:
        hidden = f"(act{dense('gate', 'x')} ⊙ {dense('up', 'x')})"
    return [
        f"feedforward(x) = {dense('down', hidden)[1:-1]}, with the arrays feedforward.*",
        f"act(a) = {ACTIVATIONS[config.activation]}",
    ]


def _attentions(config: ModelConfig) -> list[list[str]]:
    """The formulas of each kind of attention, with the layers that have it."""
    parts = []
    for name, specs in (("attention", config.attention), ("cross", config.cross_attention)):
        for spec in dict.fromkeys(specs):
            layers = ranges([layer for layer, other in enumerate(specs) if other == spec])
            parts.append([f"{name}(x) in layers {layers}, with the arrays {name}.*:", *_attention(config, spec, name)])
    return parts


def _attention(config: ModelConfig, spec: AttentionSpec, name: str) -> list[str]:
    lines, cross = _heads(config, spec, name), name == "cross"
    if spec.kind == "softmax":
        slots = "all valid slots" if cross else "all slots written so far, including this one,"
        if spec.window and not cross:
            slots = f"the last {spec.window} slots written, including this one,"
        if not cross:
            lines.append(
                "k[g] and v[g] are stored in slot `index` of the caches, which becomes valid; then index = index + 1"
            )
        lines.append(f"o[h] = Σ w[j] · v[g, j] over {slots} where w = softmax over these slots of q[h] · k[g, j] / √d")
    elif spec.kind == "windowed":
        lines += _windowed(spec, config.heads // config.kv_heads)
    else:
        if not cross:
            lines.append("S[g] = S[g] + φ(k[g]) ⊗ v[g],  z[g] = z[g] + φ(k[g])")
        denominator = _denominator(FEATURE_MAPS[spec.feature_map].normalizer)
        lines.append(f"o[h] = φ(q[h]) · S[g] / {denominator}")
    if cross:
        lines.append(
            "the source's state comes from encode: k and v of all source tokens, or the sums S and z over them"
        )
    bias = " + out.bias" if config.attention_shape.bias else ""
    return [f"    {line}" for line in [*lines, f"{name}(x) = Σ o[h] · out.kernel[h] over all h{bias}"]]


def _windowed(spec: AttentionSpec, per_group: int) -> list[str]:
    """Exact attention to the slots, linear attention to the keys that have left them."""
    turn = f"{spec.sinks} + (count − {spec.sinks}) mod {spec.window}"
    slot = f"count if count < {spec.sinks}, else {turn}" if spec.sinks else turn
    # What φ(q) and φ(k) are divided by.
    scale = " + max e(q[h]) + log_scale[g]" if spec.feature_map == "performer" else ""
    r = "0" if per_group == 1 else f"h mod {per_group}"
    return [
        f"i = {slot}; if count ≥ {spec.sinks + spec.window}, the key k' and value v' in slot i of the caches leave it:",
        "    S[g] = S[g] + φ(k'[g]) ⊗ v'[g],  z[g] = z[g] + φ(k'[g])",
        "k[g] and v[g] are stored in slot i; then count = count + 1",
        "a[j] = q[h] · k[g, j] / √d for all slots j written so far, m = max a",
        f"w = exp(min(q[h] · mixture.weight[g, {r}] + mixture.bias[g, {r}]{scale} − m, {LARGEST:g}))",
        "o[h] = (Σ exp(a[j] − m) · v[g, j] + w · φ(q[h]) · S[g]) / (Σ exp(a[j] − m) + w · max(φ(q[h]) · z[g], 0))",
    ]


def _heads(config: ModelConfig, spec: AttentionSpec, name: str) -> list[str]:
    """The queries, keys and values of query heads h and key heads g, with norms, rotary positions and feature maps."""
    per_group = config.heads // config.kv_heads
    bias = config.attention_shape.projection_bias
    source = "y" if name == "cross" else "x"

    def project(name: str, x: str, head: str, *, bias: bool = bias) -> str:
        return f"{x} · {name}.kernel[:, {head}]{f' + {name}.bias[{head}]' if bias else ''}"

    lines = [f"h = 0 … {config.heads - 1}, g = {'h' if per_group == 1 else f'h // {per_group}'}, d = {config.head_dim}"]
    if name == "cross":
        lines.append("y is the encoder's output for a source token")
    lines.append(f"v[g] = {project('value', source, 'g')}")
    if spec.kind == "merged":
        return [
            *lines,
            f"φ(q[h]) = max({project('query', 'x', 'h', bias=True)}, 0)",
            f"φ(k[g]) = max({project('key', source, 'g', bias=True)}, 0)",
        ]
    lines += [f"q[h] = {project('query', 'x', 'h')}", f"k[g] = {project('key', source, 'g')}"]
    if config.query_norm:
        end = "scales, with the mean over all heads" if config.query_norm_heads else "scale"
        lines += [
            f"{a} = {a} / √(mean({a}²) + {config.norm_eps}) · {n}_norm.{end}" for a, n in (("q", "query"), ("k", "key"))
        ]
    if name != "cross" and config.shape_of(spec).rotary is not None:
        lines += _rotary(config, spec)
    return lines + ([] if spec.kind == "softmax" else FEATURES[spec.feature_map])


def _rotary(config: ModelConfig, spec: AttentionSpec) -> list[str]:
    rotary = config.shape_of(spec).rotary
    half = (rotary.size or config.head_dim) // 2
    lines = [
        f"q and k, called a, are rotated: (a[i], a[i + {half}]) ← (a[i] cos t − a[i + {half}] sin t, "
        f"a[i + {half}] cos t + a[i] sin t),",
        f"    t = position · f[i], f[i] = {rotary.theta:g}^(−i/{half}), i = 0 … {half - 1}; the first position is 0",
    ]
    if rotary.scaling == "linear":
        lines.append(f"    f is divided by {rotary.factor:g}")
    if rotary.scaling == "factors":
        lines.append(f"    f[i] is divided by {list(rotary.factors)}[i]")
    if rotary.gain != 1:
        lines.append(f"    what is rotated is then multiplied by {rotary.gain}")
    if rotary.scaling == "llama3":
        lines += [
            f"    f[i] is replaced by s · f[i] + (1 − s) · f[i] / {rotary.factor:g},",
            f"    s = clip(({rotary.original} · f[i] / 2π − {rotary.low:g}) / {rotary.high - rotary.low:g}, 0, 1)",
        ]
    return lines


def _denominator(normalizer: Normalizer) -> str:
    if normalizer.clamp:
        return f"max(φ(q[h]) · z[g], {normalizer.value:g})"
    return f"(φ(q[h]) · z[g] + {normalizer.value:g})"


def _encoder(config: ModelConfig) -> list[str]:
    table = "embedding.table" if config.shared_embedding else "encoder.embedding.table"
    end = ", then encoder.final_norm" if config.final_norm else ""
    return [
        f"encode reads all tokens of a source at once, with the arrays encoder.*: x from {table} as above, then",
        f"layers 0 … {config.encoder_layers - 1} without cross, with softmax attention of each token to all{end}",
    ]
