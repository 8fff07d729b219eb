"""Shared set-up: eight CPU devices, checked array shapes, and small models."""

import functools
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

# Programs here are small and run once: compiling them is most of the time, so the compiler is told not to try hard.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jax").startswith("0.10."):  # later ones do not know it; a flag that is not known ends the process
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"

# Eight devices, for meshes of three axes.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK_TO_COMPILE]
)

# What was compiled once, by another worker, a process that a test starts or an earlier run, is not compiled again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from jaxtyping import install_import_hook  # noqa: E402

import tests.typecheck  # noqa: E402, F401 - found by name below

# Shapes and types of all of t2r are checked, but for commands, which only read flags (absl must find these by module).
ROOMS = sorted(path.stem for path in (Path(__file__).parents[1] / "t2r").iterdir() if path.suffix in ("", ".py"))
CHECKED = [
    f"t2r.{room}" for room in ROOMS if not room.startswith("__") and room not in ("commands", "configs", "pretrained")
]
install_import_hook(CHECKED, "tests.typecheck.checked")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402
from flax import nnx  # noqa: E402
from hypothesis import HealthCheck, is_hypothesis_test, settings  # noqa: E402

from t2r.__main__ import main  # noqa: E402
from t2r.data.pairs import number_pairs  # noqa: E402
from t2r.data.tokenizer import SentencePiece, TokenizerPair  # noqa: E402
from t2r.model import transformer  # noqa: E402
from t2r.model.config import AttentionSpec, ModelConfig, preset  # noqa: E402
from t2r.model.parameters import abstract_model, arrays_of, with_arrays  # noqa: E402
from t2r.store import model_dir  # noqa: E402

# Each example compiles, so the quick suite has few; the seed is fixed, so that a failure is the same everywhere.
# `pytest -m property --hypothesis-profile=thorough` tries many.
common = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.register_profile("quick", max_examples=3, **common)
settings.register_profile("thorough", max_examples=25, **common)
settings.load_profile("quick")


# Tests that run for each feature map: the quick suite has softmax and T2R; of the forms of linear attention, all maps.
MANY_MAPS = tuple(
    f"tests/{folder}"
    for folder in ("attention/test_module", "attention/test_windowed", "model", "decode", "conversion", "store")
)
OTHER_MAPS = ("elu", "rfa", "performer", "hybrid")


# Tests of minutes. They go first, so that at the end no worker waits for another.
LONGEST = (
    "tests/test_package",
    "tests/test_colab",
    "tests/test_docs",
    "tests/workflow",
    "tests/commands/test_commands",
)


def pytest_collection_modifyitems(items):
    """Marks what is slow by rule, and tests of properties, to be chosen with -m property; sorts."""
    for item in items:
        case = getattr(item, "callspec", None)
        if case is not None and item.nodeid.startswith(MANY_MAPS) and any(name in case.id for name in OTHER_MAPS):
            item.add_marker("slow")
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def slow_but(cases, *quick) -> list:
    """Parameters of a test, of which the quick suite has only some."""
    slow = lambda case: pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)  # noqa: E731
    return [case if case in quick else slow(case) for case in cases]


MOST_MAPS = 20_000  # Linux allows a process 65,530 memory maps; on a CPU each compiled program has several


def pytest_runtest_teardown():
    """Forgets compiled programs before a worker, which runs hundreds of tests, has too many."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


def error(actual, expected) -> float:
    """RMS of the difference over RMS of the expected, over all leaves of two trees."""
    flat = [
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]) for t in (actual, expected)
    ]
    assert flat[0].shape == flat[1].shape
    assert np.isfinite(flat[0]).all()
    return float(np.sqrt(np.mean((flat[0] - flat[1]) ** 2)) / (np.sqrt(np.mean(flat[1] ** 2)) + 1e-30))


def make_model(config: ModelConfig, seed: int = 0) -> transformer.LanguageModel:
    """A random model in which every bias and norm differs from its initial value, so that none can be forgotten."""
    chance = np.random.default_rng(seed)
    noisy = {
        name: jnp.asarray(array + 0.1 * chance.standard_normal(array.shape, np.float32) if array.ndim < 3 else array)
        for name, array in _initial_arrays(config, seed).items()
    }
    return with_arrays(abstract_model(config), noisy)


@functools.cache
def _initial_arrays(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in _initialise(config, seed).items()}


@functools.partial(jax.jit, static_argnums=0)
def _initialise(config: ModelConfig, seed: int) -> dict[str, jax.Array]:
    # As one program: initialising each array by itself compiles for seconds.
    return arrays_of(transformer.make_model(config, rngs=nnx.Rngs(jax.random.key(seed))))


def micro(**fields) -> ModelConfig:
    """The smallest model with all of the paper's parts."""
    return preset("micro_lm", **fields)


def micro_mt(**fields) -> ModelConfig:
    """The smallest translation model."""
    return preset("micro_mt", **fields)


WINDOW = dict(window=3, sinks=1)  # shorter than the sequences of tests: keys leave it


def linear_spec(name: str) -> tuple[AttentionSpec, ...]:
    """Linear attention with this map in every layer; `softmax` for none, `windowed` for T2R with a window."""
    if name == "softmax":
        return (AttentionSpec(),)
    if name == "windowed":
        return (AttentionSpec("windowed", "t2r", 8, **WINDOW),)
    return (AttentionSpec("linear", name, None if name == "elu" else 8),)


def random_tokens(batch: int, length: int, seed: int = 0, vocab: int = 260):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab, dtype=jnp.int32)


PROSE = "\n".join(
    f"The {adjective} {noun} {verb} {count} {noun}s near the {adjective} river, and nobody asked why it {verb} them."
    for adjective in ("quick", "lazy", "old", "bright", "silent", "heavy")
    for noun in ("fox", "boat", "clerk", "lamp", "engine")
    for verb in ("counts", "moves", "paints", "forgets")
    for count in ("two", "seven", "ninety")
)


@pytest.fixture(scope="session")
def tokenizer() -> SentencePiece:
    """Subwords of a little prose."""
    return SentencePiece.train(PROSE, 300)


@pytest.fixture(scope="session")
def saved_lm(tmp_path_factory, tokenizer):
    """The directory of a random language model."""
    path = tmp_path_factory.mktemp("models") / "transformer"
    model_dir.save(path, model_dir.LoadedModel(make_model(micro(vocab_size=300)), tokenizer, {"history": []}))
    return path


@pytest.fixture(scope="session")
def saved_translator(tmp_path_factory):
    """The directory of a random translation model."""
    path = tmp_path_factory.mktemp("models") / "translator"
    text = "\n".join(side for pair in number_pairs(1000) for side in pair)
    tokenizer = SentencePiece.train(text, 340, sentences=True)
    model = make_model(micro_mt(vocab_size=340, tied_output=False))
    model_dir.save(path, model_dir.LoadedModel(model, TokenizerPair(tokenizer, tokenizer), {"history": []}))
    return path


@pytest.fixture
def text_file(tmp_path):
    """A file with enough text to train on for a few steps."""
    path = tmp_path / "prose.txt"
    path.write_text(PROSE + "\n")
    return path


@pytest.fixture
def config_file(tmp_path, text_file):
    """The config of a small run on it."""
    from tests.training.runs import CONFIG

    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(text=text_file))
    return path


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB in memory; mounting one needs root."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def forget_commands() -> None:
    """Removes the flags of commands that ran in this process: others define the same ones, and some are required."""
    for name in [name for name in sys.modules if name.startswith("t2r.commands.")]:
        for flag in list(flags.FLAGS.flags_by_module_dict().get(name, [])):
            delattr(flags.FLAGS, flag.name)
        if not name.startswith("t2r.commands._"):  # absl knows these, which define flags for others, by their address
            del sys.modules[name]
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
        delattr(flags.FLAGS, name)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command in this process: (status, its JSON or what it printed as error)."""

    def run(*arguments: str) -> tuple[int, dict | str]:
        forget_commands()
        monkeypatch.setattr(sys, "argv", ["t2r", *arguments])
        status, printed = main(list(arguments)), capsys.readouterr()
        return status, json.loads(printed.out.splitlines()[-1]) if status == 0 else printed.err

    yield run
    forget_commands()
