"""Generate text from a prompt, streamed to the terminal as it comes.

python -m t2r generate --model=MODEL --prompt=TEXT --length=N [--temperature=0.8 --top_k=40 --top_p=0.95 --seed=0]
python -m t2r generate --model=MODEL --prompt=TEXT --length=N --save_state=FILE     (keeps the state for later)
python -m t2r generate --model=MODEL --load_state=FILE --length=N [--prompt=MORE]   (goes on from it)

Give --prompt several times for several texts at once.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string("model", None, "Model directory, or builtin:NAME.", required=True)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to go on from; repeat the flag for a batch.")
_LENGTH = flags.DEFINE_integer("length", 100, "Most tokens to generate.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Choose among the k likeliest tokens only; 0: among all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Choose among the likeliest tokens that together reach this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling; a loaded state has its own.")
_SAVE = flags.DEFINE_string("save_state", None, "File to keep the state in, to go on later.")
_LOAD = flags.DEFINE_string("load_state", None, "File to go on from; the prompt, if any, is added to it.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations.")
_KERNELS = flags.DEFINE_enum(
    "kernels", "auto", ["auto", "on", "off"], "On a GPU; on: wherever there are any; off: by the model's own step."
)


def main() -> dict[str, Any]:
    from t2r.console import say
    from t2r.convert import model_dir
    from t2r.data.tokenizer import opened, stops_of
    from t2r.decode.generate import go_on, read, start, until
    from t2r.decode.sampling import Sampling
    from t2r.decode.state_file import load_generation, save_generation
    from t2r.errors import InputError

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    model, tokenizer, _ = model_dir.load(_MODEL.value, dtype=_DTYPE.value, kernels=_KERNELS.value)
    encoded = [tokenizer.encode(prompt) for prompt in _PROMPT.value]
    if _LOAD.value:
        generation = load_generation(Path(_LOAD.value), model)
        batch = len(generation.done)
        if len(encoded) not in (0, batch):
            raise InputError(
                f"{_LOAD.value} holds {batch} texts, there are {len(encoded)} prompts: give {batch} or none"
            )
        generation = read(model, generation, encoded) if encoded else generation
    else:
        generation = start(model, [opened(tokenizer, ids) for ids in encoded or [[]]], _LENGTH.value, seed=_SEED.value)

    streaming = len(generation.done) == 1
    ends = stops_of(tokenizer)
    begin = _PROMPT.value[0] if _PROMPT.value else ""
    printer = Stream(tokenizer, begin, lambda ids: until(ids, ends)) if streaming else None
    began = time.perf_counter()
    generation, rows = go_on(
        model,
        generation,
        _LENGTH.value,
        end=ends,
        sampling=sampling,
        on_tokens=printer,
        segment=8 if streaming else 64,
    )
    seconds = time.perf_counter() - began
    texts = [tokenizer.decode(row) for row in rows]
    if printer is not None:
        printer.close()
    else:
        prompts = _PROMPT.value or [""] * len(texts)
        print(
            "\n\n".join(f"[{i}] {prompt}{tokenizer.glue}{text}" for i, (prompt, text) in enumerate(zip(prompts, texts)))
        )
    if _SAVE.value:
        save_generation(Path(_SAVE.value), generation)
        say(f"state kept in {_SAVE.value}")
    made = sum(map(len, rows))
    return {
        "text": texts[0] if len(texts) == 1 else texts,
        "tokens": made,
        "tokens_per_second": round(made / seconds, 1),
        "seconds": round(seconds, 2),
    }


class Stream:
    """Prints a text as its tokens come; holds back a character that is not yet complete."""

    def __init__(self, tokenizer, prompt: str, cut: Callable[[list[int]], list[int]]):
        self._tokenizer, self._ids, self._shown, self._cut = tokenizer, [], 0, cut
        sys.stdout.write(prompt + tokenizer.glue if prompt else "")
        sys.stdout.flush()

    def __call__(self, tokens) -> None:
        self._ids = self._cut([*self._ids, *(int(token) for token in tokens[0])])
        self._show(self._tokenizer.decode(self._ids).rstrip("\ufffd"))

    def _show(self, text: str) -> None:
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = max(self._shown, len(text))

    def close(self) -> None:
        self._show(self._tokenizer.decode(self._ids))
        sys.stdout.write("\n")
