"""The fields of a run. Config files start from `default_config()`; it is locked, so a misspelt field is an error."""

import difflib
import importlib.util
from pathlib import Path

from ml_collections import ConfigDict

from t2r.data.pairs import is_pairs
from t2r.errors import InputError, raise_all
from t2r.model.config import PRESETS, RUNTIME_FIELDS, ModelConfig, preset

SHIPPED = Path(__file__).parents[1] / "configs"

# Fields that may change between a run and its continuation: they do not change what is computed.
MAY_CHANGE = (
    "steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "average_checkpoints", "mesh",
    "init_preset",
)  # fmt: skip


def default_config() -> ConfigDict:
    """Every field, with a value that suits a small run."""
    config = ConfigDict(
        dict(
            seed=0,
            steps=1000,
            init_from="",  # a model directory to start from; "": random initialisation
            init_preset="",  # the preset that model was made from: enough to compile a run before there is one
            model=architecture("tiny_lm"),
            # φ to put in place of softmax; feature_map "": no conversion. features 0: the map's own size. In a
            # translation model: cross_features for cross attention (0: as features), and attention=all|causal|cross.
            convert=dict(feature_map="", features=0, cross_features=0, keep="none", attention="all"),
            trainable="all",  # or feature_maps, all_but_feature_maps, converted, decoder: see model.parameters
            data=dict(
                source="builtin:pydoc",
                valid="",  # another source to validate on; "": the valid split of `source`
                tokenizer="sentencepiece",  # or word; a model in init_from brings its own
                vocab_size=4096,  # 0 with words: all of them
                length=512,  # tokens per sequence; longer pairs are left out
                documents=False,  # of text: a sequence is one document from its beginning, else any piece of the text
                batch=8,  # of text: sequences per step, on all devices together
                batch_tokens=4096,  # of pairs: padded tokens a side per step, on all devices together
                buckets=8,  # of pairs: lengths to pad to, each compiled once
                max_ratio=0.0,  # of pairs: those with a side that many times longer are not trained on; 0: all are
                joint_tokenizer=True,  # of pairs: one tokenizer for both sides
                source_vocab_size=0,  # of pairs with two tokenizers; 0: as vocab_size
            ),
            # The model in init_from writes what is trained on: a language model texts, and then data.source is not
            # read; a translation model the targets of data.source's sources. Validation data stays as it is: for a
            # language model data.valid, or the last twentieth of its own texts.
            teacher=dict(
                writes=False,
                # Share of the loss that compares the model's probabilities with those it had before its conversion,
                # word for word, whoever wrote the text; the tokens have the rest.
                soft=0.0,
                # So many steps come first in which each converted attention learns alone to say what the one it
                # replaces says to the same input: attention transfer, see t2r.conversion.transfer.
                transfer_steps=0,
                texts=20_000,  # of a language model
                # Of a translation model: sources besides those of data.source, each made of clauses of two of them,
                # from all of its parts alike: more of what there is little of.
                spliced=0,
                length=256,  # tokens of a text at most
                temperature=1.0,  # 0: the likeliest token each time
                top_k=0,
                top_p=1.0,
                prompts="",  # a file of beginnings, one a line, taken in turn; "": texts begin with nothing
                batch=256,  # texts at a time
            ),
            accumulate=1,  # parts a batch is cut into, one after the other; pairs of other lengths in each
            label_smoothing=0.0,
            optimizer=dict(
                name="adam",  # or nesterov
                learning_rate=1e-3,
                schedule="cosine_cycles",  # or inverse_sqrt, constant
                warmup_steps=100,
                warmup_from=1e-7,
                # cosine_cycles: from learning_rate down to min_learning_rate within `period` steps (0: the rest of
                # the run), then again with the period times `period_growth` and both rates times `peak_shrink`.
                min_learning_rate=1e-5,
                period=0,
                period_growth=2.0,
                peak_shrink=0.75,
                b1=0.9,
                b2=0.98,
                eps=1e-8,
                momentum=0.99,
                weight_decay=0.0,  # on matrices only
                clip_norm=1.0,  # 0: no clipping
            ),
            # Devices along each axis (see t2r.layout); -1: all that the others leave.
            mesh=dict(data=-1, fsdp=1, tensor=1),
            log_every=10,
            eval_every=0,  # 0: at the end only
            checkpoint_every=100,
            keep_checkpoints=2,
            average_checkpoints=1,  # the result is the mean of the last so many
            export_dtype="float32",  # or float16, of the weights in workdir/model
        )
    )
    return config.lock()


def find_config(name: str) -> str:
    """The file of a config, `NAME` or `NAME:VARIANT`: a path, or the name of one that ships with the package, written
    tiny_lm, tiny_lm.py or configs/tiny_lm.py."""
    given, colon, variant = name.partition(":")
    path = Path(given)
    if not path.is_file() and path.parent in (Path(), Path("configs")):
        path = SHIPPED / f"{path.stem}.py"
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py")))
        raise InputError(f"no config file {given}: give a path, or one of those that ship with t2r: {shipped}")
    return f"{path}{colon}{variant}"


def load_config(name: str) -> ConfigDict:
    """The config of a file, as `find_config` finds it."""
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
        raise InputError(f"{path}: get_config() returned {config!r}: it must return the config")
    return config


def check_arguments(arguments: list[str]) -> list[str]:
    """The arguments with the config's file found. Its fields are looked for first, for errors that are easier to read
    than those of the flags."""
    arguments = _joined(arguments)
    files = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    if not files:
        raise InputError("--config is missing: name a file, such as --config=configs/tiny_lm.py")
    overridden = [argument.removeprefix("--config.") for argument in arguments if argument.startswith("--config.")]
    check_overrides(load_config(files[-1]), [field.split("=", 1)[0] for field in overridden])
    return [f"--config={find_config(files[-1])}" if a.startswith("--config=") else a for a in arguments]


def _joined(arguments: list[str]) -> list[str]:
    """`--config FILE` as `--config=FILE`."""
    joined = list(arguments)
    while "--config" in joined[:-1]:
        place = joined.index("--config")
        joined[place : place + 2] = [f"--config={joined[place + 1]}"]
    return joined


def check_overrides(config: ConfigDict, names: list[str]) -> None:
    """Refuses fields (`data.batch`) that the config does not have, all in one error, each with what was meant."""
    known = fields_of(config)
    problems = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f": did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
            problems.append(f"unknown field {name!r}{meant}")
    raise_all("config:", problems)


def fields_of(config: ConfigDict, prefix: str = "") -> list[str]:
    """The names of all fields, `optimizer.learning_rate` and so on."""
    names = []
    for name, value in config.items():
        names += fields_of(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else [prefix + name]
    return names


def has_teacher(config: ConfigDict) -> bool:
    """Whether something is learned from the model as it was before its conversion."""
    return bool(config.teacher.soft or config.teacher.transfer_steps)


def conversion(config: ConfigDict) -> dict:
    """The arguments of `swap` that a config asks for; {} if it asks for none."""
    plan = config.convert
    if not plan.feature_map:
        return {}
    sizes = {"features": plan.features or None, "cross_features": plan.cross_features or None}
    return {**plan, **sizes, "seed": config.seed}


def architecture(name: str, **fields) -> ConfigDict:
    """All fields of a model preset, for a run that starts from random initialisation."""
    model = preset(name, **fields).to_dict()
    del model["attention"], model["cross_attention"]  # `convert` decides
    return ConfigDict(
        {key: value for key, value in model.items() if key in PRESETS[name] or key in fields} | _runtime(model)
    )


def pretrained(**fields) -> ConfigDict:
    """The fields that may be set on a model that comes from `init_from`."""
    defaults = {name: getattr(ModelConfig, name) for name in RUNTIME_FIELDS}
    return ConfigDict(defaults | fields)


def _runtime(model: dict) -> dict:
    return {name: model[name] for name in RUNTIME_FIELDS}


def check(config: ConfigDict) -> None:
    """Refuses values no run can have; all of them in one error."""
    data, optimizer, problems = config.data, config.optimizer, []
    for name, value, least in [
        ("steps", config.steps, 1),
        ("accumulate", config.accumulate, 1),
        ("log_every", config.log_every, 1),
        ("eval_every", config.eval_every, 0),
        ("checkpoint_every", config.checkpoint_every, 1),
        ("keep_checkpoints", config.keep_checkpoints, 1),
        ("data.length", data.length, 1),
        ("data.batch", data.batch, 1),
        ("data.batch_tokens", data.batch_tokens, 1),
        ("data.buckets", data.buckets, 1),
        ("data.source_vocab_size", data.source_vocab_size, 0),
        ("average_checkpoints", config.average_checkpoints, 1),
        ("data.vocab_size", data.vocab_size, 0),
        ("convert.features", config.convert.features, 0),
        ("convert.cross_features", config.convert.cross_features, 0),
        ("teacher.texts", config.teacher.texts, 20),
        ("teacher.length", config.teacher.length, 1),
        ("teacher.spliced", config.teacher.spliced, 0),
        ("teacher.batch", config.teacher.batch, 1),
        ("teacher.transfer_steps", config.teacher.transfer_steps, 0),
        ("optimizer.warmup_steps", optimizer.warmup_steps, 0),
        ("optimizer.period", optimizer.period, 0),
    ]:
        if value < least:
            problems.append(f"config.{name}={value} must be at least {least}")
    if not 0 <= config.label_smoothing < 1:
        problems.append(f"config.label_smoothing={config.label_smoothing} must be at least 0 and below 1")
    if not is_pairs(data.source) and data.batch % max(config.accumulate, 1):
        problems.append(f"config.data.batch={data.batch} must be a multiple of config.accumulate={config.accumulate}")
    if data.max_ratio and data.max_ratio < 1:
        problems.append(f"config.data.max_ratio={data.max_ratio} must be at least 1, or 0 for all pairs")
    if not optimizer.learning_rate > 0:
        problems.append(f"config.optimizer.learning_rate={optimizer.learning_rate} must be above 0")
    if config.init_from and set(config.model) - set(RUNTIME_FIELDS):
        problems.append(
            "config.model describes an architecture, but config.init_from brings its own: use a variant made for "
            "finetuning, or set config.model to t2r.training.config.pretrained(...)"
        )
    if (config.teacher.writes or has_teacher(config)) and not config.init_from:
        problems.append("config.teacher needs config.init_from: the model that writes, or that is learned from")
    if config.teacher.transfer_steps and not config.convert.feature_map:
        problems.append("config.teacher.transfer_steps needs config.convert.feature_map: a conversion to learn")
    if not 0 <= config.teacher.soft <= 1:
        problems.append(f"config.teacher.soft={config.teacher.soft} must be at least 0 and at most 1")
    if config.export_dtype not in ("float32", "float16"):
        problems.append(f"config.export_dtype={config.export_dtype!r}: choose float32 or float16")
    raise_all("config:", problems)
