"""Serve a model over HTTP, with OpenAI's endpoints and a page on which it races the transformer it was made from.

t2r serve --model=MODEL [--transformer=MODEL] [--host=127.0.0.1 --port=8000]
    [--slots=64 --capacity=N --queue=1024 --cache_mib=256 --states=DIR --timeout=600 --body_kib=1024 --grace=10]

Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, and the page /. Without --transformer
the one that the model's provenance names is served, too, if it is there. Ctrl-C or SIGTERM ends the server.
"""

from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.", required=True
)
_TRANSFORMER = flags.DEFINE_string(
    "transformer",
    None,
    "Model to serve beside it, for the race; default: the one it was converted from; none: no other.",
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: all of this machine.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free one.", lower_bound=0, upper_bound=65535)
_SLOTS = flags.DEFINE_integer("slots", 64, "Answers written at the same time.", lower_bound=1, upper_bound=2**16)
_CAPACITY = flags.DEFINE_integer(
    "capacity",
    0,
    "Most tokens of a prompt and its answer; 0: 2,048 for models with softmax layers, else 131,072.",
    lower_bound=0,
    upper_bound=2**30,
)
_QUEUE = flags.DEFINE_integer("queue", 1024, "Answers that may wait for a slot.", lower_bound=0)
_CACHE = flags.DEFINE_integer("cache_mib", 256, "MiB for states of earlier prompts; 0: none are kept.", lower_bound=0)
_STATES = flags.DEFINE_string("states", None, "Folder that keeps these states when the server ends, for the next one.")
_TIMEOUT = flags.DEFINE_float("timeout", 600, "Most seconds of a request.", lower_bound=0.001)
_BODY = flags.DEFINE_integer("body_kib", 1024, "Most KiB of a request's body.", lower_bound=1, upper_bound=2**20)
_GRACE = flags.DEFINE_float("grace", 10, "Seconds that running answers have when the server ends.", lower_bound=0)
_TEMPLATE = flags.DEFINE_string("chat_template", None, "File with a chat template, for a model that has none.")
_WARM_UP = flags.DEFINE_bool(
    "warm_up", False, "Compile for all numbers of answers and lengths before the first request, not when needed."
)
_DTYPE, _WEIGHTS, _KERNELS = decoding.define_dtype(), decoding.define_weights(), decoding.define_kernels()


def main() -> dict[str, Any]:
    from t2r.serve.served import Limits
    from t2r.serve.server import serve

    limits = Limits(
        _SLOTS.value, _CAPACITY.value, _QUEUE.value, _CACHE.value, _TIMEOUT.value, _STATES.value, _WARM_UP.value
    )
    return serve(
        _MODEL.value,
        _TRANSFORMER.value,
        host=_HOST.value,
        port=_PORT.value,
        limits=limits,
        template=_TEMPLATE.value,
        dtype=_DTYPE.value,
        weights=_WEIGHTS.value,
        kernels=_KERNELS.value,
        body_kib=_BODY.value,
        grace=_GRACE.value,
    )
