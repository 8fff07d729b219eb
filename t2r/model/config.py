"""The architecture of a model as a frozen, validated config that reads and writes JSON; and the presets."""

import dataclasses
import itertools
import math
import typing
from dataclasses import dataclass
from typing import Any

from t2r.attention.feature_map import FEATURE_MAPS
from t2r.attention.module import AttentionShape
from t2r.attention.rotary import SCALINGS, Rotary
from t2r.errors import InputError, raise_all, unknown

CHOICES = {
    "positions": ("sinusoidal", "sinusoidal_open", "learned", "rotary", "none"),
    "rope_scaling": SCALINGS,
    "norm": ("layer", "rms"),
    "norm_placement": ("before", "after", "both", "output"),
    "activation": ("relu", "gelu", "gelu_exact", "swish"),
    "dtype": ("float32", "bfloat16"),
    "kernels": ("auto", "on", "off"),
}
MOST_FEATURES = MOST_EXACT = 2**16  # far beyond what is useful; a larger number is a mistake
RATES = ("dropout", "attention_dropout", "activation_dropout", "layer_dropout", "adaptive_dropout")
# Fields that change how a model is run or trained, not its parameters: safe to override on a pretrained model.
RUNTIME_FIELDS = (*RATES, "dtype", "kernels", "remat", "scan_layers")


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer.

    `softmax`; `linear`, with a feature map; `windowed`, the same with exact attention to the neighbourhood; or
    `merged`, linear with φ in the projections.
    """

    kind: str = "softmax"
    feature_map: str | None = None
    features: int | None = None
    # Softmax attends to the last `window` tokens, its own included, only (0: to all); windowed attention is exact for
    # them. Linear attention ignores it.
    window: int = 0
    sinks: int = 0  # windowed attention is exact for the first `sinks` tokens of a sequence, too
    rope_theta: float | None = None  # this layer's own rotary base, without scaling; None: the model's
    rotary: bool = True  # False: this layer has no positions in a model with rotary positions

    def problems(self, head_dim: int) -> list[str]:
        """What is wrong with this spec, one message for each problem."""
        sizes = {"window": self.window, "sinks": self.sinks}
        problems = [f"{name}={size} must be at least 0 (0: none)" for name, size in sizes.items() if size < 0]
        if self.kind == "softmax":
            return problems
        if self.kind not in ("linear", "windowed", "merged"):
            return [*problems, f"attention kind {self.kind!r}: choose softmax, linear, windowed or merged"]
        if self.kind == "windowed" and max(self.window, self.sinks) > MOST_EXACT:
            problems.append(f"window={self.window} and sinks={self.sinks} must be at most {MOST_EXACT:,}")
        if self.kind == "windowed" and not self.window:
            problems.append("windowed attention needs a window of at least 1 token: set window, or kind='linear'")
        return problems + self._problems_of_map(head_dim)

    def _problems_of_map(self, head_dim: int) -> list[str]:
        name, size, problems = self.feature_map, self.features, []
        if name not in FEATURE_MAPS:
            return [unknown("feature map", name, FEATURE_MAPS)]
        if size is not None and not 1 <= size <= MOST_FEATURES:
            problems.append(f"features={size}: a feature map needs 1 to {MOST_FEATURES:,} features")
        if self.kind == "merged" and name != "t2r":
            problems.append(f"only feature map 't2r' can be merged, not {name!r}")
        if name == "elu" and size not in (None, head_dim):
            problems.append(f"feature map 'elu' has head_dim={head_dim} features, not {size}: leave features out")
        pairs_of = getattr(FEATURE_MAPS[name], "pairs_of", None)
        if pairs_of and size and size % 2:
            problems.append(f"features of {name!r} come in pairs of {pairs_of}: features={size} must be even")
        return problems

    @property
    def exact_for(self) -> str:
        """The tokens to which attention is exact, in words."""
        if self.kind in ("linear", "merged"):
            return "none"
        window = f"the last {self.window}" if self.window else "all"
        return window + (f", the first {self.sinks}" if self.kind == "windowed" and self.sinks else "")

    def with_default_features(self, head_dim: int) -> "AttentionSpec":
        """The spec with `features` filled in by the feature map's default if it is None."""
        if self.kind == "softmax" or self.features is not None or self.feature_map not in FEATURE_MAPS:
            return self
        return dataclasses.replace(self, features=FEATURE_MAPS[self.feature_map].default_features or head_dim)


@dataclass(frozen=True)
class ModelConfig:
    """A transformer with softmax or linear attention in each layer.

    A language model, or a translation model if it has encoder layers.
    """

    vocab_size: int
    layers: int
    width: int  # of the residual stream
    heads: int
    feedforward: int
    kv_heads: int = 0  # 0: as many as heads; fewer: query heads share keys and values (grouped attention)
    head_dim: int = 0  # 0: width / heads
    attention: tuple[AttentionSpec, ...] = ()  # one per layer; a single one is for all layers; (): softmax in all

    encoder_layers: int = 0  # 0: a language model; else `layers` counts the decoder only. Encoders are not converted.
    cross_attention: tuple[AttentionSpec, ...] = ()  # of the decoder over the source; given like `attention`
    source_vocab_size: int = 0  # 0: vocab_size
    shared_embedding: bool = True  # one embedding table for source and target

    positions: str = "sinusoidal"  # frequencies from 1 to 1/10,000; sinusoidal_open: 1/10,000 excluded
    position_offset: int = 0  # added to sinusoidal positions, which count from 0
    max_positions: int = 0  # the number of learned positions; with others, the most tokens of a sequence (0: any)
    rope_theta: float = 10_000.0
    rope_size: int = 0  # the first dimensions of a head, which are rotated; 0: all. See `Rotary` for rope_*.
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192
    rope_factors: tuple[float, ...] = ()
    rope_gain: float = 1.0

    norm: str = "layer"
    norm_placement: str = "before"  # see `Block`
    norm_eps: float = 1e-5
    final_norm: bool = True
    embedding_norm: bool = False  # normalise embeddings before the first layer
    query_norm: bool = False  # RMS-normalise each query and key
    query_norm_heads: bool = False  # with `query_norm`: those of all heads of a token together
    parallel: bool = False  # the feed-forward has the same input as the attention
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    projection_bias: bool | None = None  # of the query, key and value projections; None: same as `bias`
    out_bias: bool | None = None  # of the attention's output projection; None: same as `bias`
    output_bias: bool = False  # of the logits

    scale_embedding: bool = True  # by √width
    embedding_multiplier: float = 1.0  # embeddings are multiplied by it too
    tied_output: bool = True
    adaptive_cutoffs: tuple[int, ...] = ()  # bounds between the bands of an adaptive embedding; (): a plain one
    adaptive_factor: int = 4  # each band's embeddings are this many times narrower than the previous band's

    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layer_dropout: float = 0.0
    adaptive_dropout: float = 0.0
    dtype: str = "float32"  # of activations; parameters are float32
    kernels: str = "auto"  # Pallas kernels: auto where measured to be faster; on where they can run; off
    remat: bool = False  # save only each layer's input for the backward pass, and recompute the rest
    scan_layers: bool = False  # compile one layer, or one period of a repeating pattern (T2R 75%), for all layers

    def __post_init__(self):
        # Defaults that depend on other fields are resolved here, so that code that reads a config sees final values.
        fill = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        uneven = []
        if self.heads > 0:
            if not self.head_dim and self.width % self.heads:
                uneven = [f"width={self.width} is not a multiple of heads={self.heads}: set head_dim"]
            fill("kv_heads", self.kv_heads or self.heads)
            fill("head_dim", self.head_dim or self.width // self.heads)
        fill("adaptive_cutoffs", tuple(self.adaptive_cutoffs))
        fill("attention", self._specs(self.attention))
        fill("cross_attention", tuple(self.cross_attention))
        if self.encoder_layers:
            fill("cross_attention", self._specs(self.cross_attention))
            fill("source_vocab_size", self.source_vocab_size or self.vocab_size)
        raise_all("model config:", uneven + self._problems())

    def _specs(self, specs: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
        """One spec for each layer: as many as layers are given, one for all, or none (softmax)."""
        specs = specs or (AttentionSpec(),)
        specs = specs * self.layers if len(specs) == 1 else specs
        return tuple(spec.with_default_features(self.head_dim) for spec in specs)

    def _problems(self) -> list[str]:
        problems = []
        for name in ("vocab_size", "layers", "width", "heads", "feedforward", "adaptive_factor"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        if problems:
            return problems
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                problems.append(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name in RATES:
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        for name in ("rope_theta", "rope_factor", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{name}={getattr(self, name)} must be above 0 and finite")
        if self.heads % self.kv_heads:
            problems.append(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim < 1 or (self.head_dim % 2 and self.positions == "rotary"):
            problems.append(f"head_dim={self.head_dim} must be at least 1, and even with rotary positions")
        if self.width % 2 and self.positions.startswith("sinusoidal"):
            problems.append(f"width={self.width} must be even with sinusoidal positions")
        if self.parallel and self.norm_placement != "before":
            problems.append(f"parallel=True needs norm_placement='before', not {self.norm_placement!r}")
        if self.rope_size % 2 or self.rope_size > self.head_dim:
            problems.append(f"rope_size={self.rope_size} must be even and at most head_dim={self.head_dim}")
        pairs = (self.rope_size or self.head_dim) // 2
        if self.rope_scaling == "factors" and len(self.rope_factors) != pairs:
            problems.append(
                f"rope_scaling='factors' needs rope_factors for each of the {pairs} rotated pairs of dimensions, not "
                f"{len(self.rope_factors)}"
            )
        if self.output_bias and self.adaptive_cutoffs:
            problems.append("output_bias=True does not work with adaptive_cutoffs: set one of them")
        if self.positions == "learned" and self.max_positions < 1:
            problems.append(f"positions='learned' needs max_positions of at least 1, not {self.max_positions}")
        bounds = (0, *self.adaptive_cutoffs, self.vocab_size)
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            problems.append(
                f"adaptive_cutoffs={self.adaptive_cutoffs} must increase, and lie between 0 and "
                f"vocab_size={self.vocab_size}"
            )
        if self.adaptive_cutoffs and not self.tied_output:
            problems.append("adaptive_cutoffs need tied_output=True")
        if self.adaptive_cutoffs and self.width < self.adaptive_factor ** len(self.adaptive_cutoffs):
            problems.append(f"width={self.width} is too small for {len(self.adaptive_cutoffs)} adaptive cutoffs")
        for layer, spec in enumerate(self.attention):
            if spec.kind == "merged" and self.positions == "rotary" and spec.rotary:
                problems.append(
                    f"layer {layer}: merged attention needs φ right after the projection, but rotary positions "
                    f"rotate queries and keys between them: use kind='linear'"
                )
            if spec.kind == "merged" and self.query_norm:
                problems.append(
                    f"layer {layer}: merged attention needs φ right after the projection, but query_norm "
                    f"normalises queries and keys between them: use kind='linear'"
                )
        return problems + self._attention_problems("attention") + self._encoder_problems()

    def _attention_problems(self, name: str) -> list[str]:
        specs = getattr(self, name)
        problems = []
        if len(specs) != self.layers:
            problems.append(
                f"{name} has {len(specs)} specs, but the model has layers={self.layers}: "
                f"give one for each layer, or one for all"
            )
        for layer, spec in enumerate(specs):
            problems += [f"layer {layer}, {name}: {problem}" for problem in spec.problems(self.head_dim)]
            if name == "cross_attention" and spec.kind == "windowed":
                problems.append(f"layer {layer}, {name}: a window is for causal attention only: use kind='linear'")
        return problems

    def _encoder_problems(self) -> list[str]:
        if self.encoder_layers < 0:
            return [f"encoder_layers={self.encoder_layers} must be at least 0 (0: a language model)"]
        if not self.encoder_layers:
            names = ("cross_attention", "source_vocab_size")
            return [
                f"{name} is for translation models: set encoder_layers or leave it out"
                for name in names
                if getattr(self, name)
            ]
        problems = self._attention_problems("cross_attention")
        if self.norm_placement == "both":
            problems.append(
                "norm_placement='both' is for language models: cross attention has no second norm; choose one of "
                "before, after and output"
            )
        if self.adaptive_cutoffs:
            problems.append("adaptive_cutoffs are for language models: leave them out of a translation model")
        if self.shared_embedding and self.source_vocab_size != self.vocab_size:
            problems.append(
                f"shared_embedding needs one vocabulary, not source_vocab_size={self.source_vocab_size} and "
                f"vocab_size={self.vocab_size}"
            )
        return problems

    @property
    def attention_shape(self) -> AttentionShape:
        """The shape of every layer's attention, before a layer's own window and rotary base: see `shape_of`."""
        return AttentionShape(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=self.bias if self.out_bias is None else self.out_bias,
            projection_bias=self.bias if self.projection_bias is None else self.projection_bias,
            rotary=self._rotary if self.positions == "rotary" else None,
            norm_eps=self.norm_eps if self.query_norm else None,
            norm_heads=self.query_norm_heads,
            dropout=self.attention_dropout,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    @property
    def _rotary(self) -> Rotary:
        scaling = dict(
            factor=self.rope_factor,
            low=self.rope_low,
            high=self.rope_high,
            original=self.rope_original,
            factors=self.rope_factors,
            gain=self.rope_gain,
        )
        return Rotary(self.rope_theta, self.rope_size, self.rope_scaling, **scaling)

    def shape_of(self, spec: AttentionSpec) -> AttentionShape:
        """The shape of the causal attention of a layer, with its own window and rotary positions as the spec says."""
        shape = dataclasses.replace(self.attention_shape, window=spec.window)
        if not spec.rotary:
            return dataclasses.replace(shape, rotary=None)
        if spec.rope_theta is None or shape.rotary is None:
            return shape
        return dataclasses.replace(shape, rotary=Rotary(spec.rope_theta, self.rope_size))

    @property
    def cross_shape(self) -> AttentionShape:
        """The shape of cross attention. Without rotary positions: those of source and target are not comparable."""
        return dataclasses.replace(self.attention_shape, rotary=None)

    def replace(self, **fields: Any) -> "ModelConfig":
        """A validated copy with some fields changed."""
        return from_dict({**dataclasses.asdict(self), **fields})

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict that JSON can hold."""
        return dataclasses.asdict(self)


def from_dict(fields: dict[str, Any]) -> ModelConfig:
    """A config from a dict such as `to_dict` makes. All unknown and missing fields are one error."""
    valid = {field.name: field for field in dataclasses.fields(ModelConfig)}
    required = {name for name, field in valid.items() if field.default is dataclasses.MISSING}
    problems = [unknown("field", name, valid) for name in sorted(set(fields) - set(valid))]
    raise_all("model config:", problems + [f"missing field {name!r}" for name in sorted(required - set(fields))])
    raise_all("model config:", _type_problems(ModelConfig, fields))
    for name in ("attention", "cross_attention"):  # dicts where the fields come from JSON
        specs = [dataclasses.asdict(spec) if not isinstance(spec, dict) else spec for spec in fields.get(name, ())]
        problems = [problem for spec in specs for problem in _type_problems(AttentionSpec, spec)]
        raise_all(f"model config, {name}:", list(dict.fromkeys(problems)))
        fields = {**fields, name: tuple(AttentionSpec(**spec) for spec in specs)}
    for name in ("adaptive_cutoffs", "rope_factors"):  # lists in JSON
        fields = {**fields, name: tuple(fields.get(name, ()))}
    return ModelConfig(**fields)


LARGEST, MOST_LAYERS = 2**31 - 1, 10_000  # array indices are int32; layers are built one by one


def _type_problems(cls: type, values: dict[str, Any]) -> list[str]:
    """What is unknown, of a wrong type or too large among the values of a dataclass, which may come from any JSON."""
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}
    problems = []
    for name, value in values.items():
        if name not in kinds:
            problems.append(f"unknown field {name!r}")
        elif not _is(value, kinds[name]):
            kind = kinds[name] if typing.get_args(kinds[name]) else kinds[name].__name__
            problems.append(f"{name}={value!r} must be of type {kind}")
        elif isinstance(value, (int, float)) and not abs(value) <= (MOST_LAYERS if "layers" in name else LARGEST):
            problems.append(f"{name}={value!r} is too large, or not a number")
    return problems


def _is(value: Any, kind: Any) -> bool:
    """Whether a value has a type; a list counts as a tuple, an integer as a float, and a dict as a spec."""
    if typing.get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_is(item, typing.get_args(kind)[0]) for item in value)
    if typing.get_args(kind):  # int | None
        return any(_is(value, choice) for choice in typing.get_args(kind))
    if kind is AttentionSpec:
        return isinstance(value, (AttentionSpec, dict))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


# WikiText-103 has a vocabulary of 267,735 words, <unk> and the end of line included.
_WIKITEXT_103 = dict(
    vocab_size=267_735,
    width=1024,
    heads=8,
    feedforward=4096,
    final_norm=False,
    adaptive_cutoffs=(20_000, 60_000),
    attention_dropout=0.1,
    activation_dropout=0.1,
    adaptive_dropout=0.2,
)

# Translation models have the norm after each residual branch, as in Vaswani et al. (2017) and in fairseq.
_TRANSLATION = dict(norm_placement="after", final_norm=False)

# Llama and the models that follow it.
_LLAMA = dict(
    positions="rotary", norm="rms", activation="swish", gated=True, bias=False, scale_embedding=False, tied_output=True
)

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's language model (§3.2.1): 32 layers, 8 heads of 128 dimensions, dropout and layer dropout 0.2.
    "paper_lm": dict(_WIKITEXT_103, layers=32, dropout=0.2, layer_dropout=0.2),
    # The model that one follows, Baevski & Auli (2019): 16 layers, dropout 0.3, no layer dropout; 247M parameters.
    "baevski_lm": dict(_WIKITEXT_103, layers=16, dropout=0.3),
    # SmolLM2-135M and Llama-3.2-1B: models that people have.
    "smollm2_135m": dict(
        _LLAMA, vocab_size=49_152, layers=30, width=576, heads=9, kv_heads=3, feedforward=1536, rope_theta=100_000.0
    ),
    "llama_1b": dict(
        _LLAMA,
        vocab_size=128_256,
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        feedforward=8192,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=32.0,
    ),
    # Small enough to train on two CPU cores; the size of builtin:tiny_lm.
    "tiny_lm": dict(vocab_size=4096, layers=4, width=192, heads=3, feedforward=768),
    # Writes short stories: a smaller vocabulary and more layers; the size of builtin:stories.
    "tiny_stories": dict(vocab_size=2048, layers=6, width=192, heads=3, feedforward=768),
    # The paper's translation model (§3.2.2), "transformer large": 16 heads of 64 dimensions.
    "paper_mt": dict(
        _TRANSLATION, vocab_size=32_768, layers=6, encoder_layers=6, width=1024, heads=16, feedforward=4096, dropout=0.3
    ),
    # Vaswani et al.'s base model.
    "base_mt": dict(
        _TRANSLATION, vocab_size=32_768, layers=6, encoder_layers=6, width=512, heads=8, feedforward=2048, dropout=0.1
    ),
    # For corpora of about 100,000 sentence pairs.
    "small_mt": dict(
        _TRANSLATION, vocab_size=8192, layers=4, encoder_layers=4, width=256, heads=4, feedforward=1024, dropout=0.2
    ),
    # Small enough to train on two CPU cores.
    "tiny_mt": dict(
        _TRANSLATION, vocab_size=512, layers=2, encoder_layers=2, width=128, heads=2, feedforward=512, dropout=0.1
    ),
    # The same structure as tiny_mt, in a size for tests.
    "micro_mt": dict(_TRANSLATION, vocab_size=60, layers=2, encoder_layers=1, width=32, heads=2, feedforward=64),
    # The structure of llama_1b, in a size for tests.
    "micro_llama": dict(_LLAMA, vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, feedforward=64),
    # The structure of paper_lm, adaptive embeddings included, in a size for tests.
    "micro_lm": dict(
        vocab_size=260, layers=2, width=32, heads=2, feedforward=64, final_norm=False, adaptive_cutoffs=(40, 120)
    ),
}


def preset(name: str, **fields: Any) -> ModelConfig:
    """The preset `name`, with some fields changed."""
    if name not in PRESETS:
        raise InputError(unknown("model preset", name, PRESETS))
    return from_dict({**PRESETS[name], **fields})
