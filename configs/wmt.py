"""The paper's translation experiments (Table 2), with the hyperparameters of its appendix (Tables 6 and 7).

    t2r train --config=configs/wmt.py:PAIR/ROW --workdir=runs/wmt/PAIR/ROW

PAIR is en_de (WMT14), en_fr (WMT14) or zh_en (WMT17). ROW is a row of the table, here with the paper's BLEU for en_de,
en_fr and zh_en (beam 5, length penalty 0.6, tokenised; * diverged):

    transformer   28.9  42.2  24.2     trained from random initialisation
    elu_scratch   28.4   *    23.4     the same with linear attention
    rfa_scratch   28.1  41.7  23.4
    t2r_scratch   27.5  39.8  23.1
    elu           28.4  41.8  23.8     from config.init_from (default: runs/wmt/PAIR/transformer/model)
    rfa           27.6  41.8  23.2
    t2r           28.7  42.1  23.8     feature sizes 32 (cross) and 4 (causal attention), like rfa

Prepare the data with launch/prepare_data --name=wmt14_translate/de-en, wmt14_translate/fr-en or wmt17_translate/zh-en;
or, from local files, with --name=sentence_pairs/en-de --files=DIR, and train with
--config.data.source=tfds:sentence_pairs/en-de,en,de. Pairs have up to 250 subwords per side; for en_de and en_fr, pairs
with one side more than 1.5 times as long as the other are dropped, as in fairseq's preparation. Evaluate with
    t2r evaluate --model=runs/wmt/en_de/t2r/model --moses=de --split_compounds \
        --data=tfds:wmt14_translate/de-en,en,de

209,911,808 parameters in the transformer for en_de: 32,768 · 1,024 in the embeddings; 6 · 12,596,224 in the encoder
(attention: 4 · (1,024² + 1,024), feed-forward: 2 · 1,024 · 4,096 + 5,120, two norms of 2,048); 6 · 16,796,672 in the
decoder (a second attention and a third norm).
"""

from t2r.errors import InputError
from t2r.training.config import architecture, default_config, pretrained
from t2r.training.rows import translation_row

# (training steps, finetuning steps, vocabulary size, joint tokenizer, approximate steps per epoch, dataset). The paper
# does not state its vocabulary sizes: these are from the preprocessing that it cites.
PAIRS = {
    "en_de": (30_000, 20_000, 32_768, True, 300, "wmt14_translate/de-en"),
    "en_fr": (60_000, 40_000, 40_000, True, 2750, "wmt14_translate/fr-en"),
    "zh_en": (30_000, 20_000, 32_768, False, 1300, "wmt17_translate/zh-en"),
}


def get_config(variant: str = "en_de/transformer"):
    pair, _, name = variant.partition("/")
    if pair not in PAIRS:
        raise InputError(f"unknown pair {pair!r} in {variant!r}: choose one of {', '.join(PAIRS)}, then /ROW")
    config = default_config()
    row = translation_row(config, name or "transformer")
    steps, finetuning_steps, vocabulary, joint, epoch, data_set = PAIRS[pair]

    config.data.source = ",".join([f"tfds:{data_set}", *pair.split("_")])
    config.data.vocab_size, config.data.joint_tokenizer = vocabulary, joint
    config.data.length, config.data.max_ratio = 250, 0.0 if pair == "zh_en" else 1.5
    config.data.buckets = 12
    # 3,584 tokens on each of 8 GPUs, accumulated 16 times: 458,752.
    config.data.batch_tokens, config.accumulate = 3584 * 8 * 16, 16

    # Weight decay as in the appendix's tables; its text has 0.01.
    config.optimizer.update(
        schedule="inverse_sqrt", warmup_steps=4000, warmup_from=1e-7, b1=0.9, b2=0.98, weight_decay=0.0, clip_norm=0.0
    )
    config.label_smoothing = 0.1
    config.checkpoint_every, config.average_checkpoints = epoch, 5
    config.eval_every = epoch
    if row.from_scratch:
        config.model = architecture("paper_mt", vocab_size=vocabulary, dtype="bfloat16")
        config.steps = steps
        config.optimizer.learning_rate = 3e-4 if name == "t2r_scratch" else 5e-4
    else:
        config.init_from, config.init_preset = f"runs/wmt/{pair}/transformer/model", "paper_mt"
        config.model = pretrained(dropout=0.3, dtype="bfloat16")
        config.steps = finetuning_steps
        config.optimizer.learning_rate = 2e-4
    return config
