"""The rows of the paper's Table 2 with about 160,000 pairs, English to German (Tatoeba). For one GPU.

    t2r study --config=tatoeba --data=tsv:deu.txt --output=runs/tatoeba --jobs=4             all rows, and a table
    t2r train --config=tatoeba:ROW --config.data.source=tsv:deu.txt --workdir=DIR            one row

The data is deu-eng.zip from https://www.manythings.org/anki/: lines of English, tab, German. Any tab-separated file of
pairs works. Splits are by source sentence: no source of the test split is trained on.

ROW is
    transformer              random initialisation (the default)
    elu_scratch, rfa_scratch, t2r_scratch    random initialisation, as many steps as the transformer
    elu, rfa, t2r            converted from config.init_from (default: runs/tatoeba/transformer/model), half the steps
    t2r_75                   T2R; the last layer of the decoder keeps softmax
    performer                FAVOR+ with a running maximum
    softmax                  a control: the same finetuning without a conversion
`t2r study` also has ROW_swapped, such as t2r_swapped: converted and not finetuned. Results: results/tatoeba.md.
"""

from t2r.training.config import architecture, default_config, pretrained
from t2r.training.rows import ROWS, translation_row

__all__ = ["EVALUATE", "ROWS", "get_config"]
EVALUATE = ("--moses=de", "--early_stopping", "--dtype=bfloat16", "--batch=128")  # beam 5 and length penalty 0.6


def get_config(name: str = "transformer"):
    config = default_config()
    row = translation_row(config, name)
    config.data.source = "tsv:deu.txt"
    config.data.vocab_size = 8192
    config.data.length = 96
    config.data.batch_tokens = 8192
    config.data.buckets = 6
    config.optimizer.update(schedule="inverse_sqrt", weight_decay=0.01, clip_norm=1.0)
    config.label_smoothing = 0.1
    config.average_checkpoints = 5
    config.checkpoint_every = 250
    config.eval_every = 1000
    config.log_every = 50
    if row.from_scratch:
        config.model = architecture("small_mt", dtype="bfloat16")
        config.steps = 10_000
        # Lower for T2R by the paper's factor, 3e-4 / 5e-4.
        config.optimizer.update(learning_rate=9e-4 if name == "t2r_scratch" else 1.5e-3, warmup_steps=2000)
    else:
        config.init_from = "runs/tatoeba/transformer/model"
        config.model = pretrained(dropout=0.2, dtype="bfloat16")
        config.steps = 5000
        config.optimizer.update(learning_rate=6e-4, warmup_steps=500)  # lower by the paper's factor, 2e-4 / 5e-4
    return config
