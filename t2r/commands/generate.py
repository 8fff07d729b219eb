"""Generate text from a prompt; a single text is printed while it is generated.

t2r generate --model=MODEL --prompt=TEXT --length=N [--temperature=0.8 --top_k=40 --top_p=0.95 --seed=0]
t2r generate --model=MODEL --prompt=TEXT --length=N --save_state=FILE     (saves the state)
t2r generate --model=MODEL --load_state=FILE --length=N [--prompt=MORE]   (continues from a saved state)
t2r generate --model=MODEL --texts=1000 --output=FILE --length=N          (writes a corpus, for --data=text:FILE)

Repeat --prompt for a batch of prompts. The last line is JSON; on a terminal it has all but the text, which stands above
it.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding
from t2r.errors import InputError

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.", required=True
)
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Prompt; repeat the flag for a batch.")
_LENGTH = flags.DEFINE_integer("length", 100, "Maximum number of tokens to generate.", lower_bound=1)
_TEMPERATURE, _TOP_K, _TOP_P = decoding.define_sampling()
_SEED = flags.DEFINE_integer(
    "seed", 0, "Random seed for sampling; a loaded state has its own.", lower_bound=0, upper_bound=2**32 - 1
)
_SAVE = flags.DEFINE_string("save_state", None, "File to save the decoding state to.")
_LOAD = flags.DEFINE_string("load_state", None, "File with a state to continue from; --prompt, if given, is appended.")
_TEXTS = flags.DEFINE_integer("texts", None, "Texts to write to --output, each of which ends.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "File for --texts, divided by lines <|endoftext|>; .gz: compressed.")
_DTYPE, _WEIGHTS, _KERNELS = decoding.define_dtype(), decoding.define_weights(), decoding.define_kernels()


def main() -> dict[str, Any]:
    from t2r.console import say
    from t2r.decode.state_file import check_state_file, save_generation
    from t2r.decode.text import check_language_model, generate_text, write_texts
    from t2r.importers import by_name
    from t2r.model.rows import for_decoding

    _check_texts()
    if _SAVE.value:
        check_state_file(Path(_SAVE.value))
    if _LOAD.value and _SEED.present:
        raise InputError(f"--seed={_SEED.value}: the random numbers of --load_state go on; leave out --seed")
    sampling = decoding.chosen_sampling(_TEMPERATURE, _TOP_K, _TOP_P, _SEED)
    loaded = by_name.load(_MODEL.value, dtype=_DTYPE.value, kernels=_KERNELS.value)
    check_language_model(loaded)
    if _WEIGHTS.value == "int8" or _TEXTS.value or len(_PROMPT.value) > 1:  # float32 by row: faster for several texts
        loaded = loaded._replace(model=for_decoding(loaded.model, _WEIGHTS.value))
    if _TEXTS.value:
        made = write_texts(
            loaded,
            Path(_OUTPUT.value),
            _TEXTS.value,
            _LENGTH.value,
            prompt="".join(_PROMPT.value),
            sampling=sampling,
            seed=_SEED.value,
        )
        return {"output": _OUTPUT.value, "texts": len(made.texts), **_speed(made)}
    printer = Printer(_PROMPT.value, loaded.tokenizer.separator)
    terminal = sys.stdout.isatty()
    result = generate_text(
        loaded,
        _PROMPT.value,
        _LENGTH.value,
        sampling=sampling,
        seed=_SEED.value,
        load_state=_LOAD.value,
        on_text=printer,
        text_every=1 if terminal else 8,
    )
    printer.finish(result.texts)
    if _SAVE.value:  # after the texts: they are not lost if the disk is full
        save_generation(Path(_SAVE.value), result.generation, loaded.model)
        say(f"state saved to {_SAVE.value}")
    return {
        **({} if terminal else {"text": result.texts[0] if len(result.texts) == 1 else result.texts}),
        **_speed(result),
    }


def _check_texts() -> None:
    """Refuses --texts without --output and the reverse, and with flags that are for a single generation."""
    if bool(_TEXTS.value) != bool(_OUTPUT.value):
        raise InputError("--texts and --output belong together: give both, or neither")
    if _TEXTS.value and (_SAVE.value or _LOAD.value or len(_PROMPT.value) > 1):
        raise InputError("--texts begins all texts alike: leave out --save_state, --load_state and further --prompt")


def _speed(made: Any) -> dict[str, Any]:
    return {
        "tokens": made.tokens,
        "tokens_per_second": round(made.tokens / made.seconds, 1),
        "seconds": round(made.seconds, 2),
    }


class Printer:
    """Prints a single text while it is generated, after its prompt; several texts at the end, each after its prompt."""

    def __init__(self, prompts: list[str], separator: str):
        self._prompts, self._separator, self._started = prompts, separator, False

    def __call__(self, text: str) -> None:
        if not self._started:
            self._started = True
            text = (self._prompts[0] + self._separator if any(self._prompts) else "") + text
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self, texts: list[str]) -> None:
        if self._started:
            return print()
        prompts = self._prompts or [""] * len(texts)
        print("\n\n".join(f"[{i}] {p}{self._separator}{text}" for i, (p, text) in enumerate(zip(prompts, texts))))
