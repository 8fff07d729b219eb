"""Converts any imported transformer into an RNN and finetunes it, on your data or on text that it generated itself.

    t2r import --source=DIR_OR_FILE --output=MODEL
    t2r train --config=configs/convert.py[:VARIANT] --config.init_from=MODEL --workdir=DIR ...

VARIANT is
    text        language models, on --config.data.source=text:FILE (the default)
    data_free   language models, on config.teacher.texts texts that the model generates before its conversion
    pairs       translation models, on --config.data.source=tsv:FILE
    distilled   translation models, on their own translations of the sources of --config.data.source=tsv:FILE

Causal attention stays exact for the last 64 tokens and the first 4, and each attention is fitted to the one it replaces
before the whole model is finetuned, on the text and on the transformer's probabilities; in a tenth of the sequences of
`text` the beginning repeats, which trains recall. VARIANT/paper, such as text/paper, is the paper's recipe: no window,
no transfer.

Fields to set:
    convert.keep=auto:4                 the four layers whose conversion does most damage keep softmax; none, every_4th,
                                        or layer numbers such as 3,7
    convert.window, sinks               tokens that stay exact; 0: φ for all
    convert.features, cross_features    feature sizes
    steps, transfer.steps               all steps, and how many of them, the first, are attention transfer
    data.batch, data.length, optimizer.learning_rate
    teacher.spliced=100000              for distilled: more source sentences, spliced from clauses of the others
The imported model's tokenizer is used. Results: results/smollm2.md, results/stories15M.md, results/opus_mt.md.
"""

from t2r.errors import InputError
from t2r.training.config import default_config, pretrained

VARIANTS = ("text", "data_free", "pairs", "distilled")


def get_config(variant: str = "text"):
    name, slash, recipe = variant.partition("/")
    if name not in VARIANTS or (slash and recipe != "paper"):
        raise InputError(f"unknown variant {variant!r}: choose one of {', '.join(VARIANTS)}, or one with /paper")
    config = default_config()
    config.init_from = ""  # must be given
    config.model = pretrained(dtype="bfloat16")
    config.convert.update(feature_map="t2r", features=32)
    config.steps = 2000
    config.log_every, config.eval_every, config.checkpoint_every = 50, 500, 500
    config.optimizer.update(learning_rate=5e-4, warmup_steps=200, weight_decay=0.01)
    if name in ("pairs", "distilled"):
        config.convert.update(features=4, cross_features=32)  # the paper's 32-4
        config.data.update(source="tsv:pairs.tsv", length=128, batch_tokens=16_384)
        config.label_smoothing = 0.1 if name == "pairs" else 0.0
        config.teacher.update(writes=name == "distilled", temperature=0.0)
    else:
        config.data.update(source="text:text.txt", length=256, batch=64)
        config.teacher.writes = config.data.documents = name == "data_free"
    if config.teacher.writes:
        config.teacher.soft = 0.5  # better than hard labels alone (0) and than soft targets alone (1)
    if recipe != "paper":
        keep_the_model(config, name)
    return config


def keep_the_model(config, name: str) -> None:
    """What off-the-shelf models need beyond the paper's recipe (results/smollm2.md, stories15M.md, opus_mt.md)."""
    config.convert.update(window=64, sinks=4)
    if name in ("pairs", "distilled"):
        config.convert.update(features=32, cross_features=128)
    config.transfer.steps = 400
    # Of text that the teacher wrote, its probabilities say more than the tokens that it drew from them.
    config.teacher.soft = 1.0 if name == "data_free" else 0.5
    if name == "text":
        config.data.repeat = 0.1
    config.optimizer.update(
        learning_rate=3e-4,
        min_learning_rate=1.5e-5,
        warmup_steps=40,
        b2=0.95,
        weight_decay=0.0,
        new_rate=10.0,
    )
