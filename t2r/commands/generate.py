"""Generate text from a prompt, streamed to the terminal as it comes.

t2r generate --model=MODEL --prompt=TEXT --length=N [--temperature=0.8 --top_k=40 --top_p=0.95 --seed=0]
t2r generate --model=MODEL --prompt=TEXT --length=N --save_state=FILE     (keeps the state for later)
t2r generate --model=MODEL --load_state=FILE --length=N [--prompt=MORE]   (goes on from it)

Give --prompt several times for several texts at once.
"""

import sys
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
    from t2r.decode.sampling import Sampling
    from t2r.decode.text import generate_text
    from t2r.store import model_dir

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    loaded = model_dir.load(_MODEL.value, dtype=_DTYPE.value, kernels=_KERNELS.value)
    printer = Printer(_PROMPT.value, loaded.tokenizer.separator)
    result = generate_text(
        loaded,
        _PROMPT.value,
        _LENGTH.value,
        sampling=sampling,
        seed=_SEED.value,
        load_state=_LOAD.value,
        save_state=_SAVE.value,
        on_text=printer,
    )
    printer.finish(result.texts)
    if _SAVE.value:
        say(f"state kept in {_SAVE.value}")
    return {
        "text": result.texts[0] if len(result.texts) == 1 else result.texts,
        "tokens": result.tokens,
        "tokens_per_second": round(result.tokens / result.seconds, 1),
        "seconds": round(result.seconds, 2),
    }


class Printer:
    """Prints one text as it comes, after its prompt; several when they are there, each with its prompt."""

    def __init__(self, prompts: list[str], separator: str):
        self._prompts, self._glue, self._begun = prompts, separator, False

    def __call__(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = (self._prompts[0] + self._glue if self._prompts else "") + text
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self, texts: list[str]) -> None:
        if self._begun:
            return print()
        prompts = self._prompts or [""] * len(texts)
        print("\n\n".join(f"[{i}] {p}{self._glue}{text}" for i, (p, text) in enumerate(zip(prompts, texts))))
