"""A small language model that writes stories: a transformer, then RNNs converted from it. For two CPU cores.

    t2r train --config=configs/stories.py:transformer --config.data.source=text:stories.txt --workdir=DIR

VARIANT is
    transformer   pretraining on stories, divided by lines <|endoftext|>; its result ships as builtin:stories
"""

from t2r.errors import InputError
from t2r.training.config import architecture, default_config


def get_config(variant: str = "transformer"):
    if variant != "transformer":
        raise InputError(f"unknown variant {variant!r}: choose transformer")
    config = default_config()
    config.data.update(source="text:stories.txt", documents=True, length=256, batch=128, vocab_size=2048)
    config.model = architecture("tiny_stories", dropout=0.0, dtype="bfloat16")
    config.steps = 2500
    config.optimizer.update(learning_rate=2e-3, warmup_steps=100, b2=0.95, weight_decay=0.05)
    config.checkpoint_every, config.log_every = 1000, 50
    config.export_dtype = "float16"  # half the file size, for the package
    return config
