"""Any transformer you have → an RNN: conversion and finetuning, on any text or on what the transformer itself writes.

    python -m t2r import --source=DIR_OR_FILE --output=MODEL
    python -m t2r train --config=configs/convert.py[:VARIANT] --config.init_from=MODEL --workdir=DIR ...

VARIANT is
    text        language models, on --config.data.source=text:FILE (the default)
    data_free   language models, on texts that the model writes before it is converted: config.teacher.texts of them
    pairs       translation models, on --config.data.source=tsv:FILE
    distilled   translation models, on their own translations of the sources of --config.data.source=tsv:FILE

What to set: config.convert.features (and cross_features); config.convert.keep, layers that stay softmax (none,
every_4th, or numbers such as 3,7); config.steps, config.data.batch and length, config.optimizer.learning_rate;
config.teacher.transfer_steps=1000, the first steps, in which each converted attention learns alone what the one it
replaces says; for distilled, config.teacher.spliced=100000, more sources, each made of clauses of two others. The
model brings its tokenizer. Results: results/stories15M.md, results/opus_mt.md.
"""

from t2r.errors import InputError
from t2r.training.config import default_config, pretrained

VARIANTS = ("text", "data_free", "pairs", "distilled")


def get_config(variant: str = "text"):
    if variant not in VARIANTS:
        raise InputError(f"unknown variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    config = default_config()
    config.init_from = "imported"
    config.model = pretrained(dtype="bfloat16")
    config.convert.update(feature_map="t2r", features=32)
    config.steps = 2000
    config.log_every, config.eval_every, config.checkpoint_every = 50, 500, 500
    config.optimizer.update(learning_rate=5e-4, warmup_steps=200, weight_decay=0.01)
    if variant in ("pairs", "distilled"):
        config.convert.update(features=4, cross_features=32)  # the paper's 32-4
        config.data.update(source="tsv:pairs.tsv", length=128, batch_tokens=16_384)
        config.label_smoothing = 0.1 if variant == "pairs" else 0.0
        config.teacher.update(writes=variant == "distilled", temperature=0.0)
    else:
        config.data.update(source="text:text.txt", length=256, batch=64)
        config.teacher.writes = config.data.documents = variant == "data_free"
    if config.teacher.writes:
        config.teacher.soft = 0.5  # between its words alone and its probabilities alone, which both did worse
    return config
