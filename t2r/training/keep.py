"""Chooses the layers that keep softmax (`keep=auto`) by measured damage, on a run's own data, before its conversion."""

import itertools
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from t2r.data.pairs import load_pairs
from t2r.data.prepared import cached_directory, stamps, stamps_of
from t2r.evaluation.damage import SOURCES, Damage, damage_on_sources, damage_on_text, reduction_of
from t2r.evaluation.keep import choose_layers
from t2r.files import read_json
from t2r.store.model_dir import LoadedModel
from t2r.training.task import corpora, splits


def with_layers_chosen(
    config: ConfigDict, workdir: Path, loaded: LoadedModel, plan: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the arguments of `swap` with layer numbers in place of `auto`, the measurement for the provenance)."""
    return choose_layers(plan, loaded.model.config, lambda: _measured(config, workdir, loaded, plan))


def _measured(config: ConfigDict, workdir: Path, loaded: LoadedModel, plan: dict[str, Any]) -> Damage:
    """The damage of each attention, from the work directory if it was measured before."""
    data, reduction, translates = config.data, reduction_of(plan), bool(loaded.model.config.encoder_layers)
    # Before `fill`, which only the first process runs: all processes wait for each other while tokens are prepared.
    tokens = None if translates else corpora(config, workdir, loaded.tokenizer)[0][0]

    def fill(folder: Path) -> None:
        if translates:
            spec, split = splits(config)[0]
            sources = [source for source, _ in itertools.islice(load_pairs(spec, split), SOURCES)]
            damage = damage_on_sources(loaded, sources, length=data.length, **reduction)
        else:
            damage = damage_on_text(loaded.model, tokens, length=data.length, **reduction)
        (folder / "damage.json").write_text(json.dumps(damage._asdict(), indent=1) + "\n")

    files = stamps([Path(config.init_from) / "model.safetensors"]), stamps_of(data.source)
    request = f"{config.init_from} {data.source} {config.teacher.writes} {data.length} {reduction} {files}"
    folder = cached_directory(workdir, "damage", request, fill)
    return Damage(**read_json(folder / "damage.json", "remove its folder: it is then measured again"))
