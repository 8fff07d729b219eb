"""Measure a server under load: many streams at once, speed, latency, and that none is lost or differs from one alone.

t2r benchmark serve --model=MODEL [--transformer=MODEL] --streams=200 [--requests=N --length=64 --ramp_up=10 --nocheck]
t2r benchmark serve --url=http://HOST:PORT --streams=200        (a server that runs already)

Starts `t2r serve` with one slot for each stream, up to --slots, and without kept states, and asks each of its models
greedily, after a first round that compiles. With --check, each prompt is also asked alone, and answers compared.
"""

from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding

_MODEL = flags.DEFINE_string(
    "model", None, "Model to start a server with: a directory, builtin:NAME, or ORG/NAME of the Hugging Face hub."
)
_TRANSFORMER = flags.DEFINE_string("transformer", None, "Model to measure beside it; default: as `t2r serve`.")
_URL = flags.DEFINE_string("url", None, "Address of a server that runs already.")
_STREAMS = flags.DEFINE_integer("streams", 200, "Requests under way at the same time.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 0, "Requests in all; 0: as many as streams.", lower_bound=0)
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens of each answer.", lower_bound=1)
_RAMP_UP = flags.DEFINE_float("ramp_up", 0, "Seconds over which the streams begin; 0: all at once.", lower_bound=0)
_WORDS = flags.DEFINE_integer("words", 8, "Words of each prompt.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 0, "Slots of the server; 0: as many as streams.", lower_bound=0)
_CHECK = flags.DEFINE_bool("check", True, "Ask each prompt alone, too, and compare.")
_DTYPE, _WEIGHTS, _KERNELS = decoding.define_dtype(), decoding.define_weights(), decoding.define_kernels()
_CAPACITY = flags.DEFINE_integer(
    "capacity", 0, "Most tokens of a prompt and its answer; 0: as `t2r serve`.", lower_bound=0, upper_bound=2**30
)


def main() -> dict[str, Any]:
    import contextlib

    from t2r.errors import InputError
    from t2r.serve import load

    if (_MODEL.value is None) == (_URL.value is None):
        raise InputError("give --model, to start a server, or --url, for one that runs")
    load.allow_connections(_STREAMS.value)
    streams, requests = _STREAMS.value, _REQUESTS.value or _STREAMS.value
    if _URL.value:
        running = contextlib.nullcontext((_URL.value.rstrip("/"), None))
    else:
        arguments = [f"--model={_MODEL.value}", f"--slots={_SLOTS.value or streams}", f"--queue={max(streams, 1024)}"]
        arguments += [f"--transformer={_TRANSFORMER.value}"] if _TRANSFORMER.value else []
        arguments += [f"--dtype={_DTYPE.value}", f"--weights={_WEIGHTS.value}", f"--kernels={_KERNELS.value}"]
        arguments += [f"--capacity={_CAPACITY.value}"]
        running = load.started([*arguments, "--cache_mib=0", "--timeout=3600"])
    with running as (url, process):
        options = dict(length=_LENGTH.value, words=_WORDS.value, ramp_up=_RAMP_UP.value, check=_CHECK.value)
        rows = [
            load.measure(url, name, streams=streams, requests=max(requests, streams), process=process, **options)
            for name in load.models_of(url)
        ]
    load.show(rows)
    return {"rows": rows}
