"""What a model is made of: frozen, validated, JSON in and out; and the presets."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from t2r.attention.feature_map import FEATURE_MAPS
from t2r.attention.module import AttentionShape
from t2r.attention.rotary import SCALINGS, Rotary
from t2r.errors import InputError, raise_all

CHOICES = {
    "positions": ("sinusoidal", "sinusoidal_open", "learned", "rotary", "none"),
    "rope_scaling": SCALINGS,
    "norm": ("layer", "rms"),
    "norm_placement": ("before", "after", "both"),
    "activation": ("relu", "gelu", "gelu_exact", "swish"),
    "dtype": ("float32", "bfloat16"),
    "kernels": ("auto", "on", "off"),
}
RATES = ("dropout", "attention_dropout", "activation_dropout", "layer_dropout", "adaptive_dropout")
# Fields that change how a model is run or trained, not its parameters: safe to override on a pretrained model.
RUNTIME_FIELDS = (*RATES, "dtype", "kernels", "remat", "scan_layers")


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer: `softmax`, `linear` (with a feature map), or `merged` (φ in the projections)."""

    kind: str = "softmax"
    feature_map: str | None = None
    features: int | None = None
    window: int = 0  # softmax sees so many tokens back, itself included; 0: all. Linear attention always sees all.
    rope_theta: float | None = None  # of this layer, with no scaling; None: as the model's

    def problems(self, head_dim: int) -> list[str]:
        """Everything wrong with this spec."""
        if self.window < 0:
            return [f"window={self.window} must be at least 0 (0: none)"]
        if self.kind == "softmax":
            return []
        if self.kind not in ("linear", "merged"):
            return [f"attention kind {self.kind!r}: choose softmax, linear or merged"]
        if self.feature_map not in FEATURE_MAPS:
            return [f"unknown feature map {self.feature_map!r}: choose one of {', '.join(FEATURE_MAPS)}"]
        found = []
        if self.features is not None and self.features < 1:
            found.append(f"features={self.features}: a feature map needs at least 1 feature")
        if self.kind == "merged" and self.feature_map != "t2r":
            found.append(f"only feature map 't2r' can be merged, not {self.feature_map!r}")
        if self.feature_map == "elu" and self.features not in (None, head_dim):
            found.append(f"feature map 'elu' has head_dim={head_dim} features, not {self.features}: leave features out")
        if self.feature_map == "rfa" and self.features and self.features % 2:
            found.append(f"feature map 'rfa' makes sine and cosine pairs: features={self.features} must be even")
        return found

    def with_default_features(self, head_dim: int) -> "AttentionSpec":
        """The same spec with the feature map's own size where none was asked for."""
        if self.kind == "softmax" or self.features is not None or self.feature_map not in FEATURE_MAPS:
            return self
        return dataclasses.replace(self, features=FEATURE_MAPS[self.feature_map].default_features or head_dim)


@dataclass(frozen=True)
class ModelConfig:
    """A transformer, softmax or converted, layer by layer: a language model, or with an encoder a translation model."""

    vocab_size: int
    layers: int
    width: int  # of the residual stream
    heads: int
    feedforward: int
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: width / heads
    attention: tuple[AttentionSpec, ...] = ()  # one per layer; (): softmax everywhere; one alone: everywhere

    encoder_layers: int = 0  # 0: a language model; else `layers` is the decoder's, and the encoder is never converted
    cross_attention: tuple[AttentionSpec, ...] = ()  # of the decoder over the encoder, as `attention`
    source_vocab_size: int = 0  # 0: as vocab_size
    shared_embedding: bool = True  # source and target have one table

    positions: str = "sinusoidal"  # frequencies from 1 to 1/10,000; with _open, that end excluded
    position_offset: int = 0  # the first token's sinusoidal position
    max_positions: int = 0  # with learned positions
    rope_theta: float = 10_000.0
    rope_size: int = 0  # dimensions of a head that are turned; 0: all
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192

    norm: str = "layer"
    norm_placement: str = "before"
    norm_eps: float = 1e-5
    final_norm: bool = True
    embedding_norm: bool = False  # of embeddings, before the first layer
    query_norm: bool = False  # RMS norm of each query and key
    parallel: bool = False  # attention and feed-forward both read the layer's input
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    projection_bias: bool | None = None  # of queries, keys and values; None: as bias
    output_bias: bool = False  # of the logits

    scale_embedding: bool = True  # by √width
    tied_output: bool = True
    adaptive_cutoffs: tuple[int, ...] = ()  # (): plain embedding; else the bounds of the frequency bands
    adaptive_factor: int = 4  # each band's embedding is this much narrower than the one before

    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layer_dropout: float = 0.0
    adaptive_dropout: float = 0.0
    dtype: str = "float32"  # of activations; parameters are float32
    kernels: str = "auto"  # in Pallas: where they were measured; on: wherever there are any; off: none
    remat: bool = False  # keep only what goes from layer to layer for the backward pass, and compute the rest again
    scan_layers: bool = False  # compile one layer, or one period of a pattern such as 75%, for all

    def __post_init__(self):
        # Defaults that follow from other fields are filled in here, so that readers need not know the rule.
        fill = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if self.heads > 0:
            fill("kv_heads", self.kv_heads or self.heads)
            fill("head_dim", self.head_dim or self.width // self.heads)
        fill("adaptive_cutoffs", tuple(self.adaptive_cutoffs))
        fill("attention", self._specs(self.attention))
        fill("cross_attention", tuple(self.cross_attention))
        if self.encoder_layers:
            fill("cross_attention", self._specs(self.cross_attention))
            fill("source_vocab_size", self.source_vocab_size or self.vocab_size)
        raise_all("model config:", self._problems())

    def _specs(self, given: tuple) -> tuple[AttentionSpec, ...]:
        specs = tuple(AttentionSpec(**spec) if isinstance(spec, dict) else spec for spec in given)
        specs = specs or (AttentionSpec(),)
        specs = specs * self.layers if len(specs) == 1 else specs
        return tuple(spec.with_default_features(self.head_dim) for spec in specs)

    def _problems(self) -> list[str]:
        found = []
        for name in ("vocab_size", "layers", "width", "heads", "feedforward", "adaptive_factor"):
            if getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be at least 1")
        if found:
            return found
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                found.append(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name in RATES:
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.heads % self.kv_heads:
            found.append(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim < 1 or (self.head_dim % 2 and self.positions == "rotary"):
            found.append(f"head_dim={self.head_dim} must be at least 1, and even with rotary positions")
        if self.width % 2 and self.positions.startswith("sinusoidal"):
            found.append(f"width={self.width} must be even with sinusoidal positions")
        if self.parallel and self.norm_placement != "before":
            found.append("parallel layers have norm_placement='before'")
        if self.rope_size % 2 or self.rope_size > self.head_dim:
            found.append(f"rope_size={self.rope_size} must be even and at most head_dim={self.head_dim}")
        if self.output_bias and self.adaptive_cutoffs:
            found.append("output_bias is for plain embeddings, not with adaptive_cutoffs")
        if self.positions == "learned" and self.max_positions < 1:
            found.append("positions='learned' needs max_positions of at least 1")
        bounds = (0, *self.adaptive_cutoffs, self.vocab_size)
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            found.append(f"adaptive_cutoffs={self.adaptive_cutoffs} must increase, between 0 and {self.vocab_size=}")
        if self.adaptive_cutoffs and not self.tied_output:
            found.append("adaptive_cutoffs need tied_output=True")
        if self.adaptive_cutoffs and self.width < self.adaptive_factor ** len(self.adaptive_cutoffs):
            found.append(f"width={self.width} is too small for {len(self.adaptive_cutoffs)} adaptive cutoffs")
        for layer, spec in enumerate(self.attention):
            if spec.kind == "merged" and self.positions == "rotary":
                found.append(f"layer {layer}: rotary positions turn queries between projection and φ: no merging")
            if spec.kind == "merged" and self.query_norm:
                found.append(f"layer {layer}: queries are normalised between projection and φ: no merging")
        return found + self._attention_problems("attention") + self._encoder_problems()

    def _attention_problems(self, name: str) -> list[str]:
        specs = getattr(self, name)
        found = []
        if len(specs) != self.layers:
            found.append(f"{name} names {len(specs)} layers, the model has layers={self.layers}")
        for layer, spec in enumerate(specs):
            found += [f"layer {layer}, {name}: {problem}" for problem in spec.problems(self.head_dim)]
        return found

    def _encoder_problems(self) -> list[str]:
        if self.encoder_layers < 0:
            return [f"encoder_layers={self.encoder_layers} must be at least 0 (0: a language model)"]
        if not self.encoder_layers:
            names = ("cross_attention", "source_vocab_size")
            return [f"{name} is for translation models: set encoder_layers" for name in names if getattr(self, name)]
        found = self._attention_problems("cross_attention")
        if self.adaptive_cutoffs:
            found.append("adaptive_cutoffs are for language models: a translation model has plain embeddings")
        if self.shared_embedding and self.source_vocab_size != self.vocab_size:
            found.append(
                f"shared_embedding needs one vocabulary, not source_vocab_size={self.source_vocab_size} and "
                f"vocab_size={self.vocab_size}"
            )
        return found

    @property
    def attention_shape(self) -> AttentionShape:
        """The shape of each layer's attention."""
        return AttentionShape(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=self.bias,
            projection_bias=self.projection_bias,
            rotary=self._rotary if self.positions == "rotary" else None,
            norm_eps=self.norm_eps if self.query_norm else None,
            dropout=self.attention_dropout,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    @property
    def _rotary(self) -> Rotary:
        scaling = dict(factor=self.rope_factor, low=self.rope_low, high=self.rope_high, original=self.rope_original)
        return Rotary(self.rope_theta, self.rope_size, self.rope_scaling, **scaling)

    def shape_of(self, spec: AttentionSpec) -> AttentionShape:
        """The shape of attention in a layer that has a window or rotary positions of its own."""
        heads = dataclasses.replace(self.attention_shape, window=spec.window)
        if spec.rope_theta is None or heads.rotary is None:
            return heads
        return dataclasses.replace(heads, rotary=Rotary(spec.rope_theta, self.rope_size))

    @property
    def cross_shape(self) -> AttentionShape:
        """The shape of attention over the encoder: positions of two sentences have no angle between them."""
        return dataclasses.replace(self.attention_shape, rotary=None)

    def replace(self, **fields: Any) -> "ModelConfig":
        """A copy with some fields changed; validated again."""
        return from_dict({**dataclasses.asdict(self), **fields})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def from_dict(fields: dict[str, Any]) -> ModelConfig:
    """A config from plain values; unknown and missing names are errors that list the known ones."""
    known = {field.name: field for field in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(fields) - set(known))
    required = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    missing = sorted(required - set(fields))
    if unknown or missing:
        raise_all(
            f"model config (its fields: {', '.join(known)}):",
            [f"unknown field {name!r}" for name in unknown] + [f"missing field {name!r}" for name in missing],
        )
    return ModelConfig(**fields)


# WikiText-103 has 267,735 words; with <unk> among them and the end of line.
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

# Transformers for translation, as Vaswani et al. (2017) and the paper's toolkit have them: norms after each branch.
_TRANSLATION = dict(norm_placement="after", final_norm=False)

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's language model (§3.2.1): 32 layers, 8 heads of 128 dimensions, dropout and layer dropout 0.2.
    "paper_lm": dict(_WIKITEXT_103, layers=32, dropout=0.2, layer_dropout=0.2),
    # Its parent, Baevski & Auli (2019): 16 layers, dropout 0.3, no layer dropout; 247M parameters.
    "baevski_lm": dict(_WIKITEXT_103, layers=16, dropout=0.3),
    # Small enough for two CPU cores; the model that ships with the package.
    "tiny_lm": dict(vocab_size=4096, layers=4, width=192, heads=3, feedforward=768),
    # The paper's translation model (§3.2.2), "transformer large": 16 heads of 64 dimensions.
    "paper_mt": dict(
        _TRANSLATION, vocab_size=32_768, layers=6, encoder_layers=6, width=1024, heads=16, feedforward=4096, dropout=0.3
    ),
    # Vaswani et al.'s base model.
    "base_mt": dict(
        _TRANSLATION, vocab_size=32_768, layers=6, encoder_layers=6, width=512, heads=8, feedforward=2048, dropout=0.1
    ),
    # For corpora of a hundred thousand pairs.
    "small_mt": dict(
        _TRANSLATION, vocab_size=8192, layers=4, encoder_layers=4, width=256, heads=4, feedforward=1024, dropout=0.2
    ),
    # Small enough for two CPU cores.
    "tiny_mt": dict(
        _TRANSLATION, vocab_size=512, layers=2, encoder_layers=2, width=128, heads=2, feedforward=512, dropout=0.1
    ),
    # The same structure at a size for tests.
    "micro_mt": dict(_TRANSLATION, vocab_size=60, layers=2, encoder_layers=1, width=32, heads=2, feedforward=64),
    # The paper's structure, adaptive bands and all, at a size for tests.
    "micro_lm": dict(
        vocab_size=260, layers=2, width=32, heads=2, feedforward=64, final_norm=False, adaptive_cutoffs=(40, 120)
    ),
}


def preset(name: str, **fields: Any) -> ModelConfig:
    """A named config, with fields changed on request."""
    if name not in PRESETS:
        raise InputError(f"unknown model preset {name!r}: choose one of {', '.join(PRESETS)}")
    return from_dict({**PRESETS[name], **fields})
