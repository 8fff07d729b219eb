"""The configs in configs/: every variant loads, is valid, and has the number of parameters its file states."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from conftest import slow_but
from t2r.conversion.swap import swap
from t2r.errors import InputError
from t2r.model.config import from_dict
from t2r.model.parameters import abstract_model, arrays_of, parameter_count
from t2r.training.config import check, load_config
from t2r.training.optimizer import make_schedule
from t2r.training.rows import ROWS
from t2r.training.shapes import abstract_run, base_architecture
from t2r.training.sharding import make_mesh

CONFIGS = Path(__file__).parents[1] / "configs"


def module(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    config_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config_module)
    return config_module


VARIANTS = (
    [f"number_words.py:{row}" for row in ROWS]
    + [f"tatoeba.py:{row}" for row in ROWS]
    + [f"wmt.py:{pair}/{row}" for pair in module("wmt").PAIRS for row in ROWS]
    + [f"wikitext103.py:{row}" for row in module("wikitext103").ROWS]
    + [f"enwik8.py:{row}" for row in module("enwik8").ROWS]
    + [f"tiny_lm.py:{variant}_k8" for variant in ("t2r", "phi_frozen", "t2r_scratch")]
    + [f"convert.py:{variant}{recipe}" for variant in module("convert").VARIANTS for recipe in ("", "/paper")]
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_valid_run(variant):
    config = load_config(f"{CONFIGS}/{variant}")
    if variant.startswith("convert"):
        config.init_from = "runs/imported"  # must be given
    check(config)
    rate = make_schedule(config.optimizer, config.steps)
    assert float(rate(config.optimizer.warmup_steps)) == pytest.approx(config.optimizer.learning_rate)


@pytest.mark.parametrize("variant", module("convert").VARIANTS)
def test_a_conversion_without_a_model_says_what_to_give(variant):
    with pytest.raises(InputError, match=r"config.init_from is missing: give(.|\n)*t2r import") as raised:
        check(load_config(f"{CONFIGS}/convert.py:{variant}"))
    assert str(raised.value).count("\n") == 1


def test_no_config_hides_a_module_of_python():
    """A script that is run in configs/ would import the config instead."""
    assert not {path.stem for path in CONFIGS.glob("*.py")} & sys.stdlib_module_names


def test_unknown_variants_are_refused():
    for name in ("wmt.py:en_es/t2r", "wmt.py:en_de/t2rr", "wikitext103.py:t2r_7", "tatoeba.py:lstm", "convert.py:all",
                 "convert.py:text/papers", "convert.py:all/paper"):  # fmt: skip
        with pytest.raises(InputError, match=r"choose one of|did you mean"):
            load_config(f"{CONFIGS}/{name}")


@pytest.mark.parametrize("name", slow_but(["wmt", "wikitext103"], "wmt"))
def test_the_papers_models_have_the_stated_number_of_parameters(name):
    """φ adds r·k·(d + 1) parameters to each converted attention, with r heads."""
    stated = int(re.search(r"^([\d,]+) parameters", module(name).__doc__, re.M)[1].replace(",", ""))
    transformer, t2r = (
        load_config(f"{CONFIGS}/{name}.py{row}") for row in ("", ":en_de/t2r" if name == "wmt" else ":t2r")
    )
    model = abstract_model(from_dict(dict(transformer.model)))
    assert parameter_count(arrays_of(model)) == stated
    plan = t2r.convert
    converted = swap(model, feature_map="t2r", features=plan.features, cross_features=plan.cross_features or None)
    layers, heads, size = model.config.layers, model.config.heads, model.config.head_dim
    added = parameter_count(arrays_of(converted)) - stated
    assert added == layers * heads * (plan.features + plan.cross_features) * (size + 1)


def test_the_papers_recipe_has_no_window_and_no_transfer():
    for variant in module("convert").VARIANTS:
        config, paper = (load_config(f"{CONFIGS}/convert.py:{name}") for name in (variant, f"{variant}/paper"))
        assert config.convert.window > 0 and config.transfer.steps > 0 and config.teacher.soft > 0
        assert paper.convert.window == paper.convert.sinks == paper.transfer.steps == 0
        assert (paper.teacher.soft > 0) == paper.teacher.writes
        translates = variant in ("pairs", "distilled")
        assert (paper.convert.features, paper.convert.cross_features) == ((4, 32) if translates else (32, 0))
        assert paper.data.to_dict() == {**config.data, "repeat": 0}


def program_key(variant):
    """What a step's program depends on, sizes aside: of variants that share it, one is lowered.

    Vocabularies differ between languages, and must be divided among devices: the transformer of each is lowered.
    """
    config = load_config(f"{CONFIGS}/{variant}")
    convert = config.convert
    transformer = None if convert.feature_map else base_architecture(config)
    return (variant.partition(":")[0], convert.feature_map, convert.keep, config.trainable, transformer)


FULL_SIZE = [variant for variant in VARIANTS if variant.startswith(("wmt", "wikitext103"))]
DISTINCT = list({program_key(variant): variant for variant in reversed(FULL_SIZE)}.values())


# All of them take minutes: by default one of each task runs, and the others with `launch/test -m slow`.
FEW = ("wmt.py:en_de/t2r",)


@pytest.mark.parametrize(
    "variant",
    [v if v in FEW else pytest.param(v, marks=pytest.mark.slow) for v in (*FEW, *sorted(set(DISTINCT) - set(FEW)))],
)
def test_every_full_size_step_lowers_for_eight_devices_and_for_tpus(variant):
    """On a mesh with all three axes; the lowered programs are partitioned."""
    config = load_config(f"{CONFIGS}/{variant}")
    mesh = make_mesh(ConfigDict(dict(data=2, fsdp=2, tensor=2)))
    run = abstract_run(config, mesh)
    for lowered in run.step(mesh).lower(run.state, run.batch, "cpu", "tpu").values():
        assert "sdy.mesh" in lowered.as_text() or "mhlo.num_partitions = 8" in lowered.as_text()


def test_steps_of_the_papers_batches():
    """73,728 and 24,576 tokens of text, 458,752 tokens of pairs per step."""
    lm, finetuned = (load_config(f"{CONFIGS}/wikitext103.py:{row}") for row in ("transformer", "t2r"))
    assert [c.data.batch * c.data.length for c in (lm, finetuned)] == [3072 * 8 * 3, 3072 * 8]
    assert load_config(f"{CONFIGS}/wmt.py").data.batch_tokens == 3584 * 8 * 16
