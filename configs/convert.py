"""Converts any imported transformer into an RNN and finetunes it, on your data or on text that it generated itself.

    t2r import --source=DIR_OR_FILE --output=MODEL
    t2r train --config=configs/convert.py[:VARIANT] --config.init_from=MODEL --workdir=DIR ...

VARIANT is
    text        language models, on --config.data.source=text:FILE (the default)
    data_free   language models, on config.teacher.texts texts that the model generates before its conversion
    pairs       translation models, on --config.data.source=tsv:FILE
    distilled   translation models, on their own translations of the sources of --config.data.source=tsv:FILE

Fields to set:
    convert.features, cross_features    feature sizes
    convert.keep                        layers that keep softmax: none, every_4th, or indices such as 3,7
    steps, data.batch, data.length, optimizer.learning_rate
    teacher.transfer_steps=1000         attention transfer: in the first 1,000 steps each converted attention is fitted
                                        to the output of the softmax attention it replaces
    teacher.spliced=100000              for distilled: more source sentences, spliced from clauses of the others
The imported model's tokenizer is used. Results: results/stories15M.md, results/opus_mt.md.
"""

from t2r.errors import InputError
from t2r.training.config import default_config, pretrained

VARIANTS = ("text", "data_free", "pairs", "distilled")


def get_config(variant: str = "text"):
    if variant not in VARIANTS:
        raise InputError(f"unknown variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    config = default_config()
    config.init_from = ""  # must be given
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
        config.teacher.soft = 0.5  # better than hard labels alone (0) and than soft targets alone (1)
    return config
