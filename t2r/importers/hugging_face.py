"""Reads models from Hugging Face directories, of the families that `families` has, and refuses configs with keys that
would change the model without being read."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from t2r.errors import InputError, raise_all
from t2r.files import read_json
from t2r.importers.families import FAMILIES, REFUSED, Family
from t2r.importers.names import TensorRule, load
from t2r.importers.rules import Fields
from t2r.model.config import ModelConfig, from_dict
from t2r.model.embedding import sinusoids
from t2r.store.tensors import Tensors


class TrackedConfig(dict):
    """A config that remembers which of its keys were read."""

    def __init__(self, content: Fields):
        super().__init__(content)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __or__(self, changes: Fields) -> "TrackedConfig":
        """A copy with other values, whose reading counts for this one too."""
        copy = TrackedConfig({**self, **changes})
        copy.read = self.read
        return copy


# Keys that do not change what a model computes: what it is called, how it was trained, how it is run or saved, which
# tokens it generates (read by `tokenizers`), heads for other tasks.
HARMLESS = re.compile(
    r"_name_or_path|name_or_path|architectures|model_type|transformers_version|_commit_hash|auto_map|torch_dtype|dtype|"
    r"(_)?attn_implementation(_autoset|_internal)?|_experts_implementation|use_cache|is_encoder_decoder|is_decoder|"
    r"initializer_range|initializer_factor|init_std|pretraining_tp|max_position_embeddings|n_ctx|gradient_checkpointing|"
    r"(hidden_|attention_|activation_|resid_p|embd_p|attn_p)?dropout|(resid|embd|attn)_pdrop|(encoder_|decoder_)?layerdrop|"
    r"classif(ier)?_dropout|summary_\w+|id2label|label2id|_?num_labels|problem_type|finetuning_task|"
    r"(bos|eos|pad|sep|cls|unk|decoder_start|forced_bos|forced_eos)_token_id|bad_words_ids|suppress_tokens|prefix|"
    r"begin_suppress_tokens|task_specific_params|tokenizer_class|output_attentions|output_hidden_states|output_past|"
    r"return_dict|return_dict_in_generate|output_scores|torchscript|use_bfloat16|tf_legacy_loss|chunk_size_feed_forward|"
    r"(max|min)_length|max_new_tokens|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|"
    r"top_k|top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|"
    r"num_return_sequences|remove_invalid_values|exponential_decay_length_penalty|normalize_before|normalize_embedding|"
    r"add_final_layer_norm|add_bias_logits|extra_pos_embeddings|force_bos_token_to_be_generated|gradient_checkpointing|"
    r"is_llama_config|transformers\.js_config|cache_implementation|kobart_version"
)


def check_keys(kind: str, config: TrackedConfig, family: Family) -> None:
    """Refuses a config with keys that were not read, may matter, and differ from the library's default."""
    defaults, problems = family.defaults, []
    for key, value in config.items():
        harmless = HARMLESS.fullmatch(key) or any(re.fullmatch(pattern, key) for pattern in family.unread)
        if key in config.read or harmless or value == defaults.get(key):
            continue
        if key in defaults:
            problems.append(f"{key}={value!r} is not supported: only {defaults[key]!r}")
        else:
            problems.append(f"{key}={value!r} is unknown: if it changes nothing, remove it from config.json")
    raise_all(f"config.json of {kind}:", problems)


def load_checkpoint(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray], Fields]:
    """A model's config and arrays, and its original config.json."""
    original = read_json(folder / "config.json", "give the directory of a Hugging Face model")
    kind = original.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{folder / 'config.json'}: model_type={kind!r} is not the name of a family")
    if original.get("quantization_config"):
        raise InputError(
            f"{folder}: quantized weights (quantization_config) are not supported: give the original model"
        )
    if kind in REFUSED:
        raise InputError(f"{folder}: {kind} is not supported: {REFUSED[kind]}")
    if kind not in FAMILIES:
        raise InputError(f"{folder}: unknown model_type {kind!r}; choose from {', '.join(sorted(FAMILIES))}")
    tensors = _without_prefix(Tensors(folder), FAMILIES[kind].prefixes)
    return *convert(original, tensors, folder / "config.json"), original


def convert(
    original: Fields,
    tensors: Mapping[str, np.ndarray],
    path: Path,
    rewrite: Callable[[TensorRule], TensorRule] = lambda rule: rule,
    ignore: tuple[str, ...] = (),
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The config and arrays of a model, from the content of its config.json (`path` is named in errors) and tensors
    without prefixes. `rewrite` adapts the family's rules to tensors of other names or layouts."""
    kind = original["model_type"]
    family = FAMILIES[kind]
    theirs = TrackedConfig({**family.defaults, **original})
    try:
        fields = family.fields(theirs)
        rules = [rewrite(rule) for rule in family.rules(theirs)]
    except KeyError as error:
        raise InputError(f"{path} has no {error}, which {kind} needs") from None
    check_keys(kind, theirs, family)
    config = from_dict(fields | stored_fields(fields, rules, tensors))
    check_positions(config, tensors)
    ignore += family.ignore + (("lm_head\\.weight",) if config.tied_output else ())
    return config, load(config, rules, tensors, ignore=ignore)


def check_positions(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Refuses a stored table of positions that differs from our sinusoids by more than the rounding of bfloat16."""
    if not config.positions.startswith("sinusoidal"):
        return
    for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
        if name in tensors and not config.position_offset:
            stored = np.asarray(tensors[name], np.float32)
            is_open = config.positions == "sinusoidal_open"
            computed = sinusoids(jnp.arange(len(stored))[None], config.width, is_open=is_open)[0]
            if stored.shape != computed.shape or np.abs(stored - np.asarray(computed)).max() > 2**-7:
                raise InputError(
                    f"{name} is not the table of sinusoids: learned tables are not supported in this family"
                )


def stored_fields(fields: Fields, rules: list[TensorRule], tensors: Mapping[str, np.ndarray]) -> Fields:
    """Fields that follow from which tensors are stored, as in transformers: an output table that differs from the
    embedding is not tied to it, whatever the config says; a missing output bias is zero."""
    names = {rule.ours: rule.theirs for rule in rules}
    output, table = names.get("embedding.output"), names.get("embedding.table")
    stored = {}
    if fields.get("output_bias") and names["embedding.bias"] not in tensors:  # a model saved without its output layer
        stored["output_bias"] = False
    if fields.get("tied_output", True) and output in tensors and table in tensors:
        stored["tied_output"] = bool(np.array_equal(tensors[output], tensors[table]))
    return stored


def _without_prefix(tensors: Mapping[str, np.ndarray], prefixes: tuple[str, ...]) -> Mapping[str, np.ndarray]:
    def short(name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)

    return _Renamed(tensors, {short(name): name for name in tensors})


class _Renamed(Mapping):
    """A mapping of tensors under other names: `names` maps the new name to the original."""

    def __init__(self, tensors: Mapping[str, np.ndarray], names: dict[str, str]):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[self._names[name]]

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
