"""English to German translation of numbers in words: a transformer, then RNNs converted from it. For two CPU cores.

    t2r train --config=configs/number_words.py[:ROW] --workdir=DIR

ROW is
    transformer              random initialisation (the default)
    t2r, elu, rfa, softmax   finetuned from config.init_from (default: runs/numbers/model); softmax, which is not
                             converted, is a control
    t2r_scratch, elu_scratch, rfa_scratch    random initialisation
T2R and RFA have the paper's feature sizes: 32 for cross and 4 for causal attention. The data is built in.
"""

from t2r.training.config import architecture, default_config, pretrained
from t2r.training.rows import translation_row


def get_config(name: str = "transformer"):
    config = default_config()
    row = translation_row(config, name)
    config.data.source = "builtin:numbers-en-de"
    config.data.vocab_size = 400
    config.data.length = 64
    config.data.batch_tokens = 2048
    config.data.buckets = 4
    config.optimizer.update(schedule="inverse_sqrt", clip_norm=0.0)
    config.label_smoothing = 0.1
    config.average_checkpoints = 5
    config.checkpoint_every = 50
    config.eval_every = 200
    if row.from_scratch:
        config.model = architecture("tiny_mt")
        config.steps = 600
        config.optimizer.update(learning_rate=2e-3, warmup_steps=200)
    else:
        config.init_from = "runs/numbers/model"
        config.model = pretrained(dropout=0.1)
        config.steps = 300
        config.optimizer.update(learning_rate=1e-3, warmup_steps=50)
    return config
