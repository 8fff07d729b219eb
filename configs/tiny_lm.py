"""A small language model on Python's own documentation: a transformer, then RNNs converted from it. For two CPU cores.

    t2r train --config=configs/tiny_lm.py[:VARIANT] --workdir=DIR

VARIANT is
    transformer   pretraining (the default); its result ships as builtin:tiny_lm
    t2r           conversion and 150 steps of finetuning, under two minutes on two cores
    t2r_long      conversion and 3,000 steps with larger batches
    t2r_75, elu, rfa, rfa_fixed, performer, phi_frozen, phi_only, softmax    other conversions; each also with _long
    t2r_scratch   T2R from random initialisation, as many steps as the transformer
With _k4, _k8, _k16, ... after t2r, phi_frozen or t2r_scratch: another feature size than 32, as in t2r_k8 (for Figures 4
to 6 of the paper, which launch/analyze_tiny trains and draws).

Measured times and perplexities: results/tiny_lm.md.
"""

import re

from t2r.errors import InputError
from t2r.training.config import architecture, default_config, pretrained

# (feature map, feature size (0: the default), layers that keep softmax, trainable parameters)
CONVERSIONS = {
    "t2r": ("t2r", 32, "none", "all"),
    "t2r_75": ("t2r", 32, "every_4th", "all"),
    "elu": ("elu", 0, "none", "all"),
    "rfa": ("rfa", 32, "none", "all"),
    "rfa_fixed": ("rfa_fixed", 32, "none", "all"),
    "performer": ("performer", 32, "none", "all"),
    "phi_frozen": ("t2r", 32, "none", "all_but_feature_maps"),
    "phi_only": ("t2r", 32, "none", "feature_maps"),
    "softmax": ("", 0, "none", "all"),  # a control: the same finetuning without a conversion
}


def get_config(variant: str = "transformer"):
    """The config of a variant, with another feature size if it ends in _kN."""
    size = re.fullmatch(r"(t2r|phi_frozen|t2r_scratch)_k([1-9]\d*)", variant)
    if not size:
        return config_of(variant)
    config = config_of(size[1])
    config.convert.features = int(size[2])
    return config


def config_of(variant: str):
    """The config of a variant without a feature size in its name."""
    config = default_config()
    config.data.source = "builtin:pydoc"
    config.optimizer.learning_rate = 1e-3
    if variant in ("transformer", "t2r_scratch"):
        long_run(config)
        config.model = architecture("tiny_lm", dropout=0.4)
        config.steps = 4000
        config.export_dtype = "float16"  # half the file size, for the package
        if variant == "t2r_scratch":
            config.convert.feature_map, config.convert.features = "t2r", 32
        return config

    name = variant.removesuffix("_long")
    if name not in CONVERSIONS:
        raise InputError(
            f"unknown variant {variant!r}: choose transformer, t2r_scratch, or one of {', '.join(CONVERSIONS)}, "
            "these also with _long; t2r, phi_frozen and t2r_scratch also with a feature size, such as t2r_k8"
        )
    config.init_from = "builtin:tiny_lm"
    feature_map, features, keep, config.trainable = CONVERSIONS[name]
    config.convert.update(feature_map=feature_map, features=features, keep=keep)
    if variant.endswith("_long"):
        long_run(config)
        config.model = pretrained(dropout=0.4)
        config.steps = 3000
    else:
        config.model = pretrained()  # no dropout: this is little more than one epoch
        config.steps = 150
        config.data.batch = 8
        config.optimizer.warmup_steps = 15
        config.eval_every = 50
    return config


def long_run(config) -> None:
    """Settings for many epochs over few tokens (half a million): larger batches and strong weight decay."""
    config.data.batch = 32
    config.optimizer.weight_decay = 0.1
    config.optimizer.warmup_steps = 100
    config.eval_every = 500
    config.checkpoint_every = 500
