"""The configuration of a model in which attention is a recurrence."""

from transformers import PretrainedConfig


class T2RConfig(PretrainedConfig):
    """`architecture` has the fields of the model, such as its widths and the attention of each layer."""

    model_type = "t2r"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, architecture=None, use_cache=True, **kwargs):
        self.architecture, self.use_cache = architecture or {}, use_cache
        super().__init__(**kwargs)
