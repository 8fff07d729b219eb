"""The config of a training run: default values, loading, command-line overrides and checks.

Config files start from `default_config()`. It is locked, so a misspelt field is an error.
"""

import importlib.util
import math
from collections.abc import Iterable
from pathlib import Path

from ml_collections import ConfigDict

from t2r.data.pairs import is_pairs
from t2r.errors import UINT32_MAX, InputError, raise_all, unknown
from t2r.model.config import PRESETS, RUNTIME_FIELDS, ModelConfig, preset

SHIPPED = Path(__file__).parents[1] / "configs"

# Fields that may change when a run is resumed: they do not change the computation of a step. (`steps` would, through a
# schedule that spans all of them: see `check_same_run`.)
MAY_CHANGE = (
    "steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "average_checkpoints", "mesh",
    "init_preset", "prepared",
)  # fmt: skip


def default_config() -> ConfigDict:
    """All fields, with values for a small run."""
    config = ConfigDict(
        dict(
            seed=0,
            steps=1000,
            init_from="",  # a model directory to start from; "": random initialisation
            init_preset="",  # the preset of that model: lets `benchmark compile` run before init_from exists
            model=architecture("tiny_lm"),
            # The conversion. feature_map: φ that replaces softmax ("": no conversion); features: feature size k (0: the
            # default of φ); keep: layers that keep softmax (none, every_4th, 3,7; or auto:4, whose conversion does
            # most damage, or auto:8MiB, as many of these as fit into a state of that size: t2r.evaluation.keep).
            # Translation models only: cross_features is k of cross attention (0: same as features), cross_keep the
            # layers that keep softmax there ("": same as keep), attention=all|causal|cross selects what is converted.
            # window, sinks: causal attention stays exact for the last `window` tokens and the first `sinks`.
            convert=dict(
                feature_map="",
                features=0,
                cross_features=0,
                window=0,
                sinks=0,
                keep="none",
                cross_keep="",
                attention="all",
            ),
            trainable="all",  # or feature_maps, all_but_feature_maps, converted, decoder: see t2r.model.parameters
            data=dict(
                source="builtin:pydoc",
                valid="",  # a separate validation source; "": the valid split of `source`
                tokenizer="sentencepiece",  # or word; not used with init_from: that model has a tokenizer
                vocab_size=4096,  # 0 (tokenizer="word" only): every word of the training data
                length=512,  # tokens per sequence; longer pairs are dropped
                documents=False,  # text: True: one document, or piece of one, per sequence; False: contiguous blocks
                repeat=0.0,  # text: share of sequences in which the beginning repeats to the end, to train recall
                batch=8,  # text: sequences per step, over all devices
                batch_tokens=4096,  # pairs: tokens per side and step, padding included, over all devices
                buckets=8,  # pairs: number of padded lengths; each is compiled once
                max_ratio=0.0,  # pairs: drop those whose longer side exceeds this multiple of the shorter; 0: keep all
                joint_tokenizer=True,  # pairs: one tokenizer for both sides
                source_vocab_size=0,  # pairs with two tokenizers; 0: same as vocab_size
            ),
            # Distillation: the model in init_from, before its conversion, is the teacher.
            teacher=dict(
                # Train on the teacher's own outputs. A language model generates texts, and data.source is not read; a
                # translation model translates the source side of data.source. Validation data is not generated, except
                # for a language model without data.valid: the last 5% of the generated texts.
                writes=False,
                # Weight of the cross entropy with the teacher's token probabilities; the labels have weight 1 - soft.
                soft=0.0,
                soft_top_k=0,  # these probabilities are over the teacher's so many likeliest tokens; 0: over all
                soft_steps=0,  # after so many steps (those of the transfer not counted) labels alone; 0: never
                texts=20_000,  # language models: texts to generate
                # Translation models: additional source sentences, each spliced from clauses of two sentences. Each
                # corpus of data.source is drawn from equally often, so that small corpora get more weight.
                spliced=0,
                length=256,  # language models: maximum number of generated tokens per text
                temperature=1.0,  # 0: greedy
                top_k=0,  # 0: no limit
                top_p=1.0,
                prompts="",  # language models: a file of prompts, one per line, used in turn; "": empty prompts
                batch=256,  # texts generated at a time
            ),
            # Attention transfer: in the first `steps` of the run's steps each converted attention is fitted to the
            # output of the softmax attention it replaces, on the same input (t2r.conversion.transfer). It has an Adam
            # of its own, which decays over its steps. trainable: feature_maps (what the conversion added) or converted
            # (the projections of converted attention, too).
            transfer=dict(
                steps=0,
                trainable="feature_maps",
                learning_rate=1e-2,
                min_learning_rate=2e-4,
                warmup_steps=20,
                clip_norm=10.0,
                weight_decay=0.0,
            ),
            accumulate=1,  # gradient accumulation: number of parts of a batch; each part has its own padded length
            label_smoothing=0.0,
            optimizer=dict(
                name="adam",  # or nesterov
                learning_rate=1e-3,
                schedule="cosine_cycles",  # or inverse_sqrt, constant
                warmup_steps=100,
                warmup_from=1e-7,
                # cosine_cycles: decay from learning_rate to min_learning_rate in `period` steps (0: all steps after
                # the warm-up), then restart with the period times `period_growth` and both rates times `peak_shrink`.
                min_learning_rate=1e-5,
                period=0,
                period_growth=2.0,
                peak_shrink=0.75,
                b1=0.9,
                b2=0.98,
                eps=1e-8,
                momentum=0.99,
                weight_decay=0.0,  # decoupled; on matrices only
                clip_norm=1.0,  # global gradient norm; 0: no clipping
                new_rate=1.0,  # factor of the learning rate of what a conversion added (φ, and the mixture of a window)
            ),
            # Devices along each mesh axis (see t2r.layout); -1: all remaining devices.
            mesh=dict(data=-1, fsdp=1, tensor=1),
            log_every=10,
            eval_every=0,  # 0: at the end only
            checkpoint_every=100,
            keep_checkpoints=2,
            average_checkpoints=1,  # the final model is the mean of the last N checkpoints
            export_dtype="float32",  # or float16: type of the weights in workdir/model
            prepared="",  # folder of tokenizers and token ids, which several runs may share; "": the work directory
        )
    )
    return config.lock()


def find_config(name: str) -> str:
    """`PATH` or `PATH:VARIANT` of a config given as `NAME` or `NAME:VARIANT`.

    NAME is a path, or a config that ships with the package: tiny_lm, tiny_lm.py or configs/tiny_lm.py.
    """
    file_name, colon, variant = name.partition(":")
    path = Path(file_name)
    if not path.is_file() and path.parent in (Path(), Path("configs")) and path.suffix in ("", ".py"):
        path = SHIPPED / f"{path.stem}.py"
    if path.is_file() and path.suffix != ".py":
        raise InputError(f"{file_name} is not a config: config files are Python files, NAME.py")
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py")))
        raise InputError(f"no config file {file_name}: give a path, or one of those that ship with t2r: {shipped}")
    return f"{path}{colon}{variant}"


def load_config(name: str) -> ConfigDict:
    """The config that `get_config(VARIANT)` of the file returns; `name` is resolved by `find_config`."""
    path, _, variant = find_config(name).partition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(variant) if variant else module.get_config()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise InputError(f"{path}: get_config() returned {config!r}: it must return a ConfigDict (see default_config)")
    return config


def check_arguments(arguments: list[str]) -> list[str]:
    """The arguments with --config resolved to a path. Unknown --config.FIELD flags raise a readable InputError here,
    before ml_collections would reject them."""
    arguments = _join_config_flag(arguments)
    files = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    if not files:
        raise InputError("--config is missing: give a config file, such as --config=configs/tiny_lm.py")
    overridden = [argument.removeprefix("--config.") for argument in arguments if argument.startswith("--config.")]
    check_overrides(load_config(files[-1]), [field.split("=", 1)[0] for field in overridden])
    return [f"--config={find_config(files[-1])}" if a.startswith("--config=") else a for a in arguments]


def _join_config_flag(arguments: list[str]) -> list[str]:
    """Rewrites `--config FILE` as `--config=FILE`."""
    joined = list(arguments)
    while "--config" in joined[:-1]:
        index = joined.index("--config")
        joined[index : index + 2] = [f"--config={joined[index + 1]}"]
    return joined


def check_overrides(config: ConfigDict, names: list[str]) -> None:
    """Raises one InputError for all fields (`data.batch`) that the config does not have, with suggestions."""
    raise_all("config:", list(unknown_fields(config, names).values()))


def unknown_fields(config: ConfigDict, names: Iterable[str]) -> dict[str, str]:
    """The fields that the config does not have, each with what to say about it."""
    known = field_names(config)
    return {name: unknown("field", name, known) for name in names if name not in known}


def field_names(config: ConfigDict, prefix: str = "") -> list[str]:
    """Dotted names of all fields, such as `optimizer.learning_rate`."""
    names = []
    for name, value in config.items():
        names += field_names(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [prefix + name]
    return names


def has_teacher(config: ConfigDict) -> bool:
    """Whether training needs the unconverted model, for soft targets or attention transfer."""
    return bool(config.teacher.soft or config.transfer.steps)


def conversion(config: ConfigDict) -> dict:
    """The arguments of `swap` for the config's conversion; {} without a conversion."""
    plan = config.convert
    if not plan.feature_map:
        return {}
    sizes = {"features": plan.features or None, "cross_features": plan.cross_features or None}
    sizes["cross_keep"] = plan.cross_keep or None
    return {**plan, **sizes, "seed": config.seed}


def architecture(name: str, **fields) -> ConfigDict:
    """config.model of a run from random initialisation: the fields of a model preset, with `fields` changed."""
    model = preset(name, **fields).to_dict()
    del model["attention"], model["cross_attention"]  # config.convert sets them
    return ConfigDict(
        {key: value for key, value in model.items() if key in PRESETS[name] or key in fields} | _runtime(model)
    )


def pretrained(**fields) -> ConfigDict:
    """config.model of a run that starts from `init_from`: only the fields that a trained model may change."""
    defaults = {name: getattr(ModelConfig, name) for name in RUNTIME_FIELDS}
    return ConfigDict(defaults | fields)


def _runtime(model: dict) -> dict:
    return {name: model[name] for name in RUNTIME_FIELDS}


def check(config: ConfigDict) -> None:
    """Raises one InputError for all invalid values of a config."""
    data, optimizer, problems = config.data, config.optimizer, []
    for name, value, least in [
        ("seed", config.seed, 0),
        ("steps", config.steps, 1),
        ("accumulate", config.accumulate, 1),
        ("log_every", config.log_every, 1),
        ("eval_every", config.eval_every, 0),
        ("checkpoint_every", config.checkpoint_every, 1),
        ("keep_checkpoints", config.keep_checkpoints, 1),
        ("data.length", data.length, 2),  # validation scores the second half of each window
        ("data.batch", data.batch, 1),
        ("data.batch_tokens", data.batch_tokens, 1),
        ("data.buckets", data.buckets, 1),
        ("data.source_vocab_size", data.source_vocab_size, 0),
        ("average_checkpoints", config.average_checkpoints, 1),
        ("data.vocab_size", data.vocab_size, 0),
        ("convert.features", config.convert.features, 0),
        ("convert.cross_features", config.convert.cross_features, 0),
        ("convert.window", config.convert.window, 0),
        ("convert.sinks", config.convert.sinks, 0),
        ("teacher.texts", config.teacher.texts, 20),  # the last 5% validate: at least one text
        ("teacher.length", config.teacher.length, 1),
        ("teacher.spliced", config.teacher.spliced, 0),
        ("teacher.batch", config.teacher.batch, 1),
        ("teacher.soft_top_k", config.teacher.soft_top_k, 0),
        ("teacher.soft_steps", config.teacher.soft_steps, 0),
        ("transfer.steps", config.transfer.steps, 0),
        ("transfer.warmup_steps", config.transfer.warmup_steps, 0),
        ("optimizer.warmup_steps", optimizer.warmup_steps, 0),
        ("optimizer.period", optimizer.period, 0),
    ]:
        if not least <= value <= UINT32_MAX:
            problems.append(f"config.{name}={value} must be at least {least} and at most {UINT32_MAX}")
    if not 0 <= config.label_smoothing < 1:
        problems.append(f"config.label_smoothing={config.label_smoothing} must be at least 0 and below 1")
    if not 0 <= data.repeat <= 1:
        problems.append(f"config.data.repeat={data.repeat} must be at least 0 and at most 1")
    if not is_pairs(data.source) and data.batch % max(config.accumulate, 1):
        problems.append(f"config.data.batch={data.batch} must be a multiple of config.accumulate={config.accumulate}")
    if data.max_ratio and data.max_ratio < 1:
        problems.append(f"config.data.max_ratio={data.max_ratio} must be at least 1, or 0 to keep all pairs")
    for name in ("learning_rate", "eps", "period_growth", "peak_shrink", "new_rate"):
        if not 0 < optimizer[name] < math.inf:
            problems.append(f"config.optimizer.{name}={optimizer[name]} must be above 0 and finite")
    for name in ("min_learning_rate", "clip_norm", "weight_decay"):
        if not 0 <= config.transfer[name] < math.inf:
            problems.append(f"config.transfer.{name}={config.transfer[name]} must be at least 0 and finite")
    if not 0 < config.transfer.learning_rate < math.inf:
        problems.append(f"config.transfer.learning_rate={config.transfer.learning_rate} must be above 0 and finite")
    for name in ("min_learning_rate", "warmup_from", "weight_decay", "clip_norm"):
        if not 0 <= optimizer[name] < math.inf:
            problems.append(f"config.optimizer.{name}={optimizer[name]} must be at least 0 and finite")
    for name in ("b1", "b2", "momentum"):
        if not 0 <= optimizer[name] < 1:
            problems.append(f"config.optimizer.{name}={optimizer[name]} must be at least 0 and below 1")
    if config.init_from and set(config.model) - set(RUNTIME_FIELDS):
        problems.append(
            "config.model sets an architecture, but config.init_from already has one: use a config variant for "
            "finetuning, or set config.model to t2r.training.config.pretrained(...)"
        )
    if not config.init_from and not config.init_preset and not set(config.model) - set(RUNTIME_FIELDS):
        problems.append(
            "config.init_from is missing: give the model to start from, a directory that `t2r import` or `t2r train` "
            "wrote, as in --config.init_from=runs/gpt2, or --config.init_from=builtin:tiny_lm"
        )
    elif (config.teacher.writes or has_teacher(config)) and not config.init_from:
        problems.append("config.teacher needs config.init_from: the model that is the teacher")
    if config.transfer.steps and not config.convert.feature_map:
        problems.append("config.transfer.steps needs config.convert.feature_map: it fits a conversion to the teacher")
    if config.transfer.steps and config.transfer.trainable not in ("feature_maps", "converted"):
        problems.append(f"config.transfer.trainable={config.transfer.trainable!r}: choose feature_maps or converted")
    if config.transfer.steps > config.steps:
        problems.append(f"config.transfer.steps={config.transfer.steps} must be at most config.steps={config.steps}")
    if not 0 <= config.teacher.soft <= 1:
        problems.append(f"config.teacher.soft={config.teacher.soft} must be at least 0 and at most 1")
    if config.export_dtype not in ("float32", "float16"):
        problems.append(f"config.export_dtype={config.export_dtype!r}: choose float32 or float16")
    raise_all("config:", problems)
