"""The paper's language modelling experiments (Table 1, Figures 4 and 5), with the hyperparameters of its appendix.

    t2r train --config=configs/wikitext103.py:ROW --workdir=runs/wikitext103/ROW

ROW, with the paper's perplexity on the validation and test set:

    transformer   17.9  18.5     32 layers, trained from random initialisation for 286,000 steps
    elu_scratch   22.0  22.8     the same with linear attention, feature size k = 128
    rfa_scratch   20.4  21.3     k = 32
    t2r_scratch   20.1  20.8     k = 32
    elu           21.5  22.2     142,000 steps from config.init_from (default: runs/wikitext103/transformer/model)
    rfa           20.8  21.6
    t2r           19.0  19.6
    t2r_75        17.9  18.5     every fourth layer from the top keeps softmax
    t2r_8, t2r_16, t2r_64, t2r_128     other feature sizes (Figure 4)
    phi_frozen    φ is not trained, everything else is
    phi_only      only φ is trained

The data is tokenised by words; prepare it with launch/prepare_data --name=wikitext103 [--files=DIR]. Evaluate with
    t2r evaluate --model=runs/wikitext103/t2r/model --data=tfds:wikitext103

448,472,512 parameters in the transformer: adaptive embeddings of 20,000 · 1,024 + 40,000 · 256 + 207,735 · 64 with
projections of (1,024 + 256 + 64) · 1,024, and two class vectors of 1,024; 32 layers of 12,596,224 (attention:
4 · (1,024² + 1,024), feed-forward: 2 · 1,024 · 4,096 + 5,120, two norms of 2,048). T2R adds 8 · 32 · (128 + 1)
parameters to each converted layer.
"""

from t2r.errors import InputError, unknown
from t2r.model.config import RATES, preset
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
    "t2r_8": ("t2r", 8, "none", "all"),
    "t2r_16": ("t2r", 16, "none", "all"),
    "t2r_64": ("t2r", 64, "none", "all"),
    "t2r_128": ("t2r", 128, "none", "all"),
    "phi_frozen": ("t2r", 32, "none", "all_but_feature_maps"),
    "phi_only": ("t2r", 32, "none", "feature_maps"),
}


def get_config(row: str = "transformer"):
    if row not in ROWS:
        raise InputError(unknown("row", row, ROWS))
    config = default_config()
    feature_map, features, keep, config.trainable = ROWS[row]
    config.convert.update(feature_map=feature_map, features=features, keep=keep)
    config.data.update(
        source="tfds:wikitext103",
        tokenizer="word",
        vocab_size=0,
        length=512,
    )
    config.optimizer.update(
        name="nesterov", momentum=0.99, clip_norm=0.1, warmup_from=1e-7, period_growth=2.0, peak_shrink=0.75
    )
    config.log_every, config.eval_every, config.checkpoint_every = 100, 5000, 1000
    # Minimum learning rates as in the appendix's tables; its text has a tenth of each.
    if row == "transformer" or row.endswith("_scratch"):
        config.model = architecture("paper_lm", dtype="bfloat16", scan_layers=True)
        config.steps = 286_000
        config.data.batch = 144  # 3,072 tokens on each of 8 GPUs, accumulated 3 times: 73,728 tokens
        config.accumulate = 3
        config.optimizer.update(learning_rate=1.0, min_learning_rate=1e-4, warmup_steps=16_000, period=270_000)
    else:
        config.init_from, config.init_preset = "runs/wikitext103/transformer/model", "paper_lm"
        paper = preset("paper_lm")
        rates = {name: getattr(paper, name) for name in RATES}
        config.model = pretrained(**rates, dtype="bfloat16", scan_layers=True)
        config.steps = 142_000
        config.data.batch = 48  # 24,576 tokens
        config.optimizer.update(learning_rate=0.5, min_learning_rate=5e-5, warmup_steps=8000, period=135_000)
    return config
