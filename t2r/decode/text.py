"""Text generation from prompts, one or a batch, and of whole corpora: what `t2r generate` does."""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from t2r.console import Progress
from t2r.data.tokenizer import Tokenizer, continuation_prefix, decode_after, prompt_ids, stop_ids
from t2r.decode.generate import Generation, append_prompts, generate_tokens, prefill, truncate_at_stop
from t2r.decode.sampling import Sampling
from t2r.decode.state_file import load_generation, save_generation
from t2r.environment import running_time
from t2r.errors import InputError, check_seed
from t2r.files import atomic_file, check_output_file
from t2r.store.model_dir import LoadedModel

MOST_TOKENS = 2**31 - 1  # positions are int32
SEPARATOR = "\n<|endoftext|>\n"  # between the texts of a file
SEGMENT = 64  # tokens per compiled loop, when nobody reads along
_SEEDS_APART = 0x9E3779B1  # odd, and 2**32 by the golden ratio: its multiples are far apart in 32 bits
_WINDOW = 32  # tokens that a stream decodes again with each new one, since a character may be of several tokens


def check_language_model(loaded: LoadedModel) -> None:
    """Raises an InputError for a translation model."""
    if loaded.model.config.encoder_layers:
        raise InputError("this is a translation model: use `t2r translate`")


class GeneratedText(NamedTuple):
    """The continuation of each prompt, with token counts and time."""

    texts: list[str]
    tokens: int  # of all texts together
    seconds: float  # of generation, without reading the prompts and without compiling
    generation: Generation  # to continue from


def generate_text(
    loaded: LoadedModel,
    prompts: Sequence[str] = (),
    length: int = 100,
    *,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    load_state: str | Path | None = None,
    save_state: str | Path | None = None,
    on_text: Callable[[str], None] | None = None,
    text_every: int = 1,
) -> GeneratedText:
    """Generates up to `length` tokens after each prompt, greedily by default; without prompts, one text from scratch.

    `load_state` continues from a state file, `save_state` writes one. For a single prompt, `on_text` is called with the
    new text after every `text_every` tokens; more at a time are faster.
    """
    model, tokenizer, _ = loaded
    check_language_model(loaded)
    if not 1 <= length <= MOST_TOKENS:
        raise InputError(f"length={length} must be at least 1 and at most {MOST_TOKENS:,}")
    check_seed(seed)
    if save_state:
        check_output_file(Path(save_state))
    generation = _begin(loaded, prompts, length, seed, load_state)
    stops = stop_ids(tokenizer)
    prefixes = [continuation_prefix(tokenizer, last) for last in generation.last.tolist()]
    single = len(generation.done) == 1
    stream = TextStream(tokenizer, stops, on_text, prefixes[0]) if single and on_text else None
    began = running_time()
    generation, sequences = generate_tokens(
        model,
        generation,
        length,
        end=stops,
        sampling=sampling,
        on_tokens=stream,
        segment=text_every if stream else SEGMENT,
    )
    seconds = running_time() - began
    if stream:
        stream.close()
    if save_state:
        save_generation(Path(save_state), generation, model)
    texts = [decode_after(tokenizer, prefix, ids) for prefix, ids in zip(prefixes, sequences)]
    return GeneratedText(texts, sum(map(len, sequences)), seconds, generation)


def write_texts(
    loaded: LoadedModel,
    path: Path,
    count: int,
    length: int,
    *,
    prompt: str = "",
    sampling: Sampling = Sampling(),
    seed: int = 0,
    batch: int = 128,
) -> GeneratedText:
    """Writes `count` texts to a file, divided by lines <|endoftext|>, as `text:FILE` reads them; .gz compresses it.

    A text that has not ended after `length` tokens is left out: cut off, it would teach a model to stop anywhere.
    """
    check_output_file(path)
    check_seed(seed)
    tokenizer = loaded.tokenizer
    texts, tokens, seconds = [], 0, 0.0
    seed = seed * _SEEDS_APART % 2**32  # each batch of texts has the next one: files of two seeds share none
    with Progress("texts", count) as progress:
        while len(texts) < count:
            # As many each time, whatever `count` is: the first texts of a longer file are those of a shorter one.
            made = generate_text(loaded, [prompt] * batch, length, sampling=sampling, seed=seed)
            ended = [
                (prompt + tokenizer.separator + text).strip()
                for text, done in zip(made.texts, made.generation.done.tolist())
                if done
            ]
            ended = list(filter(None, ended))
            if not ended:
                raise InputError(f"none of {batch} texts ended within length={length} tokens: raise the length")
            ended = ended[: count - len(texts)]
            texts, tokens, seconds = [*texts, *ended], tokens + made.tokens, seconds + made.seconds
            seed = (seed + 1) % 2**32
            progress.advance(len(ended))
    content = (SEPARATOR.join(texts) + "\n").encode()
    with atomic_file(path) as unfinished:
        # Without the time of compression, so that the same texts are the same file.
        unfinished.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return GeneratedText(texts, tokens, seconds, made.generation)


def _begin(
    loaded: LoadedModel, prompts: Sequence[str], length: int, seed: int, load_state: str | Path | None
) -> Generation:
    model, tokenizer, _ = loaded
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if not load_state:
        return prefill(model, [prompt_ids(tokenizer, ids) for ids in encoded or [[]]], length, seed=seed)
    generation = load_generation(Path(load_state), model)
    batch = len(generation.done)
    if len(encoded) not in (0, batch):
        raise InputError(
            f"{load_state} has {batch} sequences and there are {len(encoded)} prompts: give {batch} or none"
        )
    return append_prompts(model, generation, encoded) if encoded else generation


class TextStream:
    """Calls `on_text` with new text as tokens arrive; holds back a character whose bytes are not complete yet.

    `prefix` is that of `continuation_prefix`; a text that continues nothing has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[int, ...],
        on_text: Callable[[str], None],
        prefix: Sequence[int] = (),
    ):
        self._tokenizer, self._stops, self._on_text = tokenizer, stops, on_text
        # The last tokens, and how many characters of their text were shown or are the prefix's.
        self._ids = list(prefix)
        self._shown = len(tokenizer.decode(self._ids))

    def __call__(self, tokens) -> None:
        self._ids += truncate_at_stop([int(token) for token in tokens[0]], self._stops)
        text = self._tokenizer.decode(self._ids)
        self._show(text.rstrip("\ufffd"))
        if len(self._ids) > 2 * _WINDOW and not text.endswith("\ufffd"):  # all is shown: forget the older half
            self._ids = self._ids[-_WINDOW:]
            self._shown = len(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> None:
        self._on_text(text[self._shown :])
        self._shown = max(self._shown, len(text))

    def close(self) -> None:
        self._show(self._tokenizer.decode(self._ids))
