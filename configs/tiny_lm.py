"""A language model for two CPU cores: pretrain a transformer on text every Python has, then make it an RNN."""

from t2r.train.config import architecture, default_config, pretrained


def get_config(variant: str = "transformer"):
    config = default_config()
    config.model = architecture("tiny_lm", dropout=0.2)
    config.steps = 3000
    config.data.batch = 16
    return config
