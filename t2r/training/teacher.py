"""Training data that the model to be converted writes itself, before it is converted: no corpus is needed.

A language model writes whole texts, from prompts or from nothing; a translation model translates the sources of a
corpus, whose own targets are not read. What is written is kept in the work directory, in parts as they get ready.
"""

import functools
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from t2r.console import Progress, say
from t2r.data.buckets import EncodedPairs
from t2r.data.pairs import load_pairs
from t2r.data.prepared import cached_directory, fill_if_absent, read_ids, stamps_of, write_ids
from t2r.data.sources import read_text, split_spec
from t2r.data.tokenizer import Tokenizer, TokenizerPair, decoder_start_ids, prompt_ids, stop_ids
from t2r.decode.beam import default_limit
from t2r.decode.generate import generate_tokens, prefill, prefill_translation
from t2r.decode.sampling import Sampling
from t2r.decode.translator import pad
from t2r.model.transformer import LanguageModel
from t2r.store import model_dir

Rows = list[list[int]]
CLAUSE = re.compile(r"(?<=[,;.!?，；。！？、])")  # where sources may be cut
SHOWN = 200  # texts, or sources and targets, that are kept to be read by people


def written_tokens(config: ConfigDict, workdir: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All ids of the teacher's texts, and where each text ends."""
    plan = config.teacher
    prompts = [line for line in read_text(Path(plan.prompts)).splitlines() if line.strip()] if plan.prompts else [""]
    begins = [prompt_ids(tokenizer, tokenizer.encode(prompt)) for prompt in prompts]
    closing = tokenizer.encode_document("")

    def write(model: LanguageModel, first: int, count: int) -> Rows:
        rows = [begins[number % len(begins)] for number in range(first, first + count)]
        generation = prefill(model, rows, plan.length, seed=_seed(config, first))
        _, found = generate_tokens(model, generation, plan.length, end=stop_ids(tokenizer), sampling=_sampling(config))
        texts = []
        for row, ids in zip(rows, found):
            said = [*(row[1:] if row[0] == tokenizer.end else row), *ids]
            # A text that did not come to its end has none; the next one begins all the same.
            texts.append([*said, *(closing if len(ids) < plan.length else closing[-1:])])
        return texts

    def show(rows: Rows) -> list[str]:
        return [tokenizer.decode(row[: -len(closing)]) for row in rows]

    return read_ids(_written(config, workdir, f"{prompts}", plan.texts, write, show) / "texts")


def written_pairs(config: ConfigDict, workdir: Path, spec: str, split: str, tokenizer: TokenizerPair) -> EncodedPairs:
    """A corpus's sources, and more made of them if wanted, with the teacher's translations of them."""
    corpora = [list(dict.fromkeys(source for source, _ in load_pairs(part, split))) for part in split_spec(spec)]
    texts = [*(text for corpus in corpora for text in corpus), *spliced(corpora, config.teacher.spliced, config.seed)]
    sources = [tokenizer.encode_source(source) for source in dict.fromkeys(texts)]
    sources = sorted((ids for ids in sources if len(ids) <= config.data.length), key=len)  # alike ones in a batch
    target = tokenizer.target

    def write(model: LanguageModel, first: int, count: int) -> Rows:
        chosen = sources[first : first + count]
        rows = pad(chosen, count)
        length = min(default_limit(rows.shape[1]), config.data.length)  # by the width: few programs are compiled
        generation = prefill_translation(
            model, rows, length, start=decoder_start_ids(target), seed=_seed(config, first)
        )
        _, found = generate_tokens(model, generation, length, end=target.stop, sampling=_sampling(config), segment=16)
        # A translation that does not come to its end is none; pairs with an empty side are left out of batches.
        ended = [ids if len(ids) < length else [] for ids in found]
        return [
            row
            for source, ids in zip(chosen, ended)
            for row in (source, [*decoder_start_ids(target), *ids, target.stop])
        ]

    def show(rows: Rows) -> list[str]:
        sides = zip(rows[::2], rows[1::2])
        return [f"{tokenizer.source.decode(source)}\t{target.decode(ids)}" for source, ids in sides]

    request = f"{spec} {split} {stamps_of(spec)} {config.data.length}"
    return EncodedPairs(*read_ids(_written(config, workdir, request, len(sources), write, show) / "texts"))


def spliced(corpora: list[list[str]], count: int, seed: int) -> Iterator[str]:
    """`count` texts that nobody wrote: the first clauses of one and the last of another, for a teacher to translate.

    Each half comes from any of the corpora, the small ones as often as the large.
    """
    chance = random.Random(seed)
    for _ in range(count):
        first, second = (list(filter(None, CLAUSE.split(chance.choice(chance.choice(corpora))))) for _ in range(2))
        some = [chance.randint(1, max(len(clauses) - 1, 1)) for clauses in (first, second)]
        yield "".join([*first[: some[0]], *second[-some[1] :]]).strip()


def _written(
    config: ConfigDict,
    workdir: Path,
    request: str,
    texts: int,
    write: Callable[[LanguageModel, int, int], Rows],
    show: Callable[[Rows], list[str]],
) -> Path:
    """The folder of what the teacher has written, by now or before; parts of an unfinished one are taken up again."""
    stamps = stamps_of(f"model:{config.init_from}/model.safetensors")
    plan = {**config.teacher, "soft": 0, "transfer_steps": 0}  # what is written does not depend on them
    request = f"{config.init_from} {stamps} {plan} {config.seed} {request}"
    parts = workdir / f"teacher-parts-{zlib.crc32(request.encode()):08x}"

    def fill(folder: Path) -> None:
        model = model_dir.load(config.init_from, dtype=config.model.dtype).model
        say(f"{config.init_from} writes {texts:,} texts, kept in {workdir}")
        rows = _in_parts(parts, texts, config.teacher.batch, lambda first, count: write(model, first, count))
        write_ids(folder / "texts", ([row] for row in rows))
        ids, ends = read_ids(folder / "texts")
        first = np.split(ids, ends[:SHOWN])[:-1]
        (folder / "sample.txt").write_text("\n\n".join(show([row.tolist() for row in first])) + "\n", "utf-8")
        shutil.rmtree(parts)

    return cached_directory(workdir, "teacher", request, fill)


def _in_parts(folder: Path, texts: int, batch: int, write: Callable[[int, int], Rows]) -> Iterator[np.ndarray]:
    """Rows of ids, a batch of texts at a time, each of which is kept when it is there."""
    with Progress("teacher", texts) as progress:
        for first in range(0, texts, batch):
            count = min(batch, texts - first)
            part, rows = folder / f"{first}", functools.partial(write, first, count)
            fill_if_absent(
                part, lambda unfinished, rows=rows: write_ids(unfinished / "texts", ([row] for row in rows()))
            )
            ids, ends = read_ids(part / "texts")
            yield from np.split(ids, ends[:-1])
            progress.advance(count)


def _sampling(config: ConfigDict) -> Sampling:
    return Sampling(config.teacher.temperature, config.teacher.top_k, config.teacher.top_p)


def _seed(config: ConfigDict, first: int) -> int:
    return config.seed + first  # each batch draws its own
