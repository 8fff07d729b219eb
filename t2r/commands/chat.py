"""Talk to a model with a chat template, in the terminal.

t2r chat --model=MODEL [--system=TEXT --temperature=0.7 --top_k=0 --top_p=0.95 --length=512 --seed=0]

Each line is a message; the answer is printed while it is written. The model's state is kept between turns, so that the
conversation is not read again. /reset begins a new one, Ctrl-C stops an answer, Ctrl-D (the end of the input) ends.
"""

import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.", required=True
)
_SYSTEM = flags.DEFINE_string("system", None, "Message that begins every conversation.")
_TEMPERATURE, _TOP_K, _TOP_P = decoding.define_sampling(temperature=0.7, top_p=0.95)
_LENGTH = flags.DEFINE_integer("length", 512, "Most tokens of an answer.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", None, "Random seed; default: another one each time.", lower_bound=0)
_TEMPLATE = flags.DEFINE_string("chat_template", None, "File with a chat template, for a model that has none.")
_DTYPE, _WEIGHTS = decoding.define_dtype(), decoding.define_weights()


def main() -> dict[str, Any]:
    from t2r.errors import InputError, check_seed
    from t2r.serve.conversation import Conversation, converse

    if _SEED.value is not None:
        check_seed(_SEED.value)
    if sys.stdin is None:
        raise InputError("standard input is closed: t2r chat reads messages from it")
    sampling = decoding.chosen_sampling(_TEMPERATURE, _TOP_K, _TOP_P, _SEED)
    options = dict(template=_TEMPLATE.value, system=_SYSTEM.value, dtype=_DTYPE.value, weights=_WEIGHTS.value)
    conversation = Conversation(_MODEL.value, sampling=sampling, **options)
    try:
        converse(conversation, _lines(), _write, most=_LENGTH.value, seed=_SEED.value)
    finally:
        conversation.close()
    return {"turns": conversation.turns, "tokens": conversation.tokens, "tokens_read": conversation.read}


def _lines() -> Iterator[str]:
    """What is typed, or piped, until its end. On a terminal a prompt is shown, and the line can be edited."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - input() uses it

        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # Ctrl-C while nothing is answered
                print()
    try:
        for line in sys.stdin:
            line.encode()  # in some locales Python reads other bytes as characters that are none
            yield line
    except UnicodeError:
        from t2r.errors import InputError

        raise InputError("standard input is not UTF-8 text") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
