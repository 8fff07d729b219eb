"""The rows of the paper's Table 1 and its ablations on Wikipedia's prose (enwik8, cleaned, in subwords). For one GPU.

    launch/enwik8 enwik8.gz runs/enwik8                                                    everything; or, in steps:
    launch/clean_wikipedia enwik8.gz wikipedia.txt
    t2r study --config=enwik8 --data=text:wikipedia.txt --output=runs/enwik8 --jobs=4      all rows, and a table
    t2r train --config=enwik8:ROW --config.data.source=text:wikipedia.txt --workdir=DIR    one row

ROW is
    transformer     random initialisation (the default): 8 layers, 6 heads of 64
    elu_scratch, rfa_scratch, t2r_scratch     linear attention from random initialisation, as many steps
    elu, rfa, t2r   converted from config.init_from (default: runs/enwik8/transformer/model), half as many steps
    t2r_75          T2R; every fourth layer from the top keeps softmax
    rfa_fixed       RFA whose random features are drawn once, not at every step
    performer       FAVOR+ with a running maximum
    phi_frozen      T2R; everything but φ is trained
    phi_only        T2R; only φ is trained
    t2r_window      T2R; the last 64 tokens and the first 4 stay exact
    softmax         a control: the same finetuning without a conversion
    t2r_8, t2r_64, phi_frozen_8, phi_frozen_64, t2r_8_scratch, t2r_64_scratch     other feature sizes (Figures 4 to 6)
    hedgehog, hedgehog_64, t2r_elu, t2r_elu_64      other learned φ: softmax of features; T2R with ELU's activation
    t2r, t2r_64, t2r_75, t2r_window and hedgehog with _fast_phi: φ has ten times the learning rate of the rest;
                    t2r_64_phi_x3: three times
    softmax, elu, performer, t2r, t2r_64, t2r_fast_phi, t2r_64_fast_phi, t2r_64_phi_x3, hedgehog_64 and t2r_elu_64 with
                    _long (twice as many steps), _low_rate or _high_rate (a third of the learning rate, or three times):
                    do they change which is better?
`t2r study` also has ROW_swapped, such as t2r_swapped: converted and not finetuned.

This is not WikiText-103: the text is an eighth of its size, tokens are subwords, the model has 17.3M parameters instead
of 448M, and it is trained for three epochs. Perplexities can be compared with each other only.
"""

from t2r.errors import InputError, unknown
from t2r.training.config import architecture, default_config, pretrained

# (feature map, feature size (0: the default), layers that keep softmax, trainable parameters)
ROWS = {
    "transformer": ("", 0, "none", "all"),
    "elu_scratch": ("elu", 0, "none", "all"),
    "rfa_scratch": ("rfa", 32, "none", "all"),
    "t2r_scratch": ("t2r", 32, "none", "all"),
    "elu": ("elu", 0, "none", "all"),
    "rfa": ("rfa", 32, "none", "all"),
    "t2r": ("t2r", 32, "none", "all"),
    "t2r_75": ("t2r", 32, "every_4th", "all"),
    "rfa_fixed": ("rfa_fixed", 32, "none", "all"),
    "performer": ("performer", 32, "none", "all"),
    "phi_frozen": ("t2r", 32, "none", "all_but_feature_maps"),
    "phi_only": ("t2r", 32, "none", "feature_maps"),
    "t2r_window": ("t2r", 32, "none", "all"),
    "softmax": ("", 0, "none", "all"),
    "t2r_8": ("t2r", 8, "none", "all"),
    "t2r_64": ("t2r", 64, "none", "all"),
    "phi_frozen_8": ("t2r", 8, "none", "all_but_feature_maps"),
    "phi_frozen_64": ("t2r", 64, "none", "all_but_feature_maps"),
    "t2r_8_scratch": ("t2r", 8, "none", "all"),
    "t2r_64_scratch": ("t2r", 64, "none", "all"),
    "hedgehog": ("hedgehog", 32, "none", "all"),
    "hedgehog_64": ("hedgehog", 64, "none", "all"),
    "t2r_elu": ("t2r_elu", 32, "none", "all"),
    "t2r_elu_64": ("t2r_elu", 64, "none", "all"),
}
ROWS |= {f"{row}_fast_phi": ROWS[row] for row in ("t2r", "t2r_64", "t2r_75", "t2r_window", "hedgehog")}
ROWS["t2r_64_phi_x3"] = ROWS["t2r_64"]
PHI_RATES = {"_fast_phi": 10.0, "_phi_x3": 3.0}  # a part of a row's name: learning rate of φ over that of the rest
# Added to the name of a row: (factor of its steps, factor of its learning rate).
CHANGES = {"_long": (2, 1.0), "_low_rate": (1, 1 / 3), "_high_rate": (1, 3.0)}
CHANGED = ("softmax", "elu", "performer", "t2r", "t2r_64", "t2r_fast_phi", "hedgehog_64", "t2r_elu_64")
CHANGED += ("t2r_64_fast_phi", "t2r_64_phi_x3")
ROWS |= {row + change: ROWS[row] for change in CHANGES for row in CHANGED}
EVALUATE = ("--batch=64",)


def get_config(row: str = "transformer"):
    if row not in ROWS:
        raise InputError(unknown("row", row, ROWS))
    config = default_config()
    feature_map, features, keep, config.trainable = ROWS[row]
    config.convert.update(feature_map=feature_map, features=features, keep=keep)
    if row.startswith("t2r_window"):
        config.convert.update(window=64, sinks=4)
    config.data.update(source="text:wikipedia.txt", vocab_size=8192, length=512, batch=32)
    config.optimizer.update(weight_decay=0.1, b2=0.95)
    config.log_every, config.checkpoint_every = 50, 400
    config.keep_checkpoints = 1
    if row == "transformer" or row.endswith("_scratch"):
        sizes = dict(vocab_size=8192, layers=8, width=384, heads=6, feedforward=1536)
        config.model = architecture("tiny_lm", **sizes, dropout=0.1, dtype="bfloat16", scan_layers=True)
        config.steps = 2400
        config.optimizer.update(learning_rate=1e-3, warmup_steps=240)
    else:
        config.init_from = "runs/enwik8/transformer/model"
        config.model = pretrained(dropout=0.1, dtype="bfloat16", scan_layers=True)
        steps, rate = next((factors for change, factors in CHANGES.items() if row.endswith(change)), (1, 1.0))
        config.steps = 1200 * steps
        config.optimizer.update(learning_rate=5e-4 * rate, warmup_steps=120)  # the paper halves both, too
        config.optimizer.new_rate = next((rate for part, rate in PHI_RATES.items() if part in row), 1.0)
    return config
