"""A small language model that writes stories: a transformer, then RNNs converted from it without any data.

    t2r train --config=configs/stories.py:transformer --config.data.source=text:FILE --workdir=DIR
    t2r train --config=configs/stories.py:t2r --workdir=DIR

VARIANT is
    transformer   pretraining on a file of stories, divided by lines <|endoftext|>; its result ships as builtin:stories
    t2r           that model, converted as in the paper: attention is linear for all tokens (the default)
    window        likewise, but attention stays exact for the last 64 tokens and the first 4, and each attention is
                  fitted to the one it replaces before the whole model is finetuned

Conversions train on builtin:stories, which the transformer wrote, to give the transformer's probabilities. They are
short, for two CPU cores; the quickstart runs both. φ, which starts random, has ten times the learning rate of the rest:
in so few steps that is worth much (`t2r`: perplexity 7.0 instead of 8.0).
"""

from t2r.errors import InputError
from t2r.training.config import architecture, default_config, pretrained


def get_config(variant: str = "t2r"):
    if variant not in ("transformer", "t2r", "window"):
        raise InputError(f"unknown variant {variant!r}: choose transformer, t2r or window")
    config = default_config()
    config.data.update(source="builtin:stories", documents=True, length=256, batch=8)
    config.optimizer.b2 = 0.95
    if variant == "transformer":
        config.data.update(source="text:stories.txt", batch=128, vocab_size=2048)
        config.model = architecture("tiny_stories", dropout=0.0, dtype="bfloat16")
        config.steps = 1500
        config.optimizer.update(learning_rate=2e-3, warmup_steps=100, weight_decay=0.05)
        config.checkpoint_every, config.log_every = 1000, 50
        config.export_dtype = "float16"  # half the file size, for the package
        return config

    config.init_from, config.model = "builtin:stories", pretrained()
    config.convert.update(feature_map="t2r", features=32)
    config.teacher.soft = 1.0  # text that the teacher wrote says less than the probabilities it was drawn from
    config.steps = 60
    config.optimizer.update(learning_rate=1e-3, warmup_steps=10, new_rate=10.0)
    if variant == "window":
        config.convert.update(window=64, sinks=4)
        config.steps, config.transfer.steps = 24, 12
        config.transfer.warmup_steps = 5
        config.optimizer.update(learning_rate=3e-4, warmup_steps=5)
    return config
