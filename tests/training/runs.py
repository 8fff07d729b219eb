"""Helpers for tests that train in a subprocess: a small config, the command, and the logged losses."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import QUICK_TO_COMPILE
from t2r.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]

CONFIG = """
from t2r.training.config import architecture, default_config

def get_config():
    config = default_config()
    config.steps = 24
    config.model = architecture("micro_lm", dropout=0.1, adaptive_cutoffs=())
    config.convert.feature_map = "rfa"  # draws new random features at every step, so that the random key matters
    config.convert.features = 8
    config.data.source = "text:{text}"
    config.data.vocab_size = 300
    config.data.length = 32
    config.data.batch = 4
    config.accumulate = 2
    config.optimizer.warmup_steps = 4
    config.log_every = 1
    config.eval_every = 10
    config.checkpoint_every = 3
    return config
"""


def command(config_file, workdir, *more):
    return [sys.executable, "-m", "t2r", "train", f"--config={config_file}", f"--workdir={workdir}", *more]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_TO_COMPILE}


def train(config_file, workdir, *more):
    return subprocess.run(
        command(config_file, workdir, *more), env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def losses(workdir):
    return {line["step"]: line["loss"] for line in read_metrics(workdir / "metrics.jsonl") if "loss" in line}
