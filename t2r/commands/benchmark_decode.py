"""Measure decoding speed against generated length, and compare it with the memory bandwidth bound.

t2r benchmark decode --preset=paper_lm --output=DIR [--field=vocab_size=32768 --field=adaptive_cutoffs=()]
    [--rows=transformer,t2r,t2r_unmerged,t2r_75,t2r_window,t2r_hybrid,t2r_hybrid_4th,elu,rfa]
    [--lengths=512,1024,...,32768]
    [--batch=16] [--dtype=bfloat16] [--weights=bfloat16,int8] [--window=32] [--largest_batch] [--whole] [--prompt=N]
    [--beam=5]
    [--peers --peer_lengths=512,4096 --peer_names=hugging_face_static]
    [--budget_seconds=N] [--again] [--device_report]
t2r benchmark decode --preset=paper_mt ...         (translation: sources as long as the outputs, timed separately)
t2r benchmark decode --model=DIRECTORY ...         (the architecture of a model; --rows=model: without conversion)
t2r benchmark decode --model=DIRECTORY --peers --peer_model=ORIGINAL ...    (same weights as Hugging Face, llama.cpp)
t2r benchmark decode --preset=paper_mt --topology=v2:2x2 ...    (the TPU compiler's estimate; nothing is run)

Decoding is greedy and unconditional. Weights are random; with --peer_model, which --model was imported from, t2r's and
Hugging Face's models have its weights, and what a conversion adds is random. All steps of one length cost the same, so
only the last --steps steps are timed; --whole times all of them. The floor is the number of bytes of weights and state
that a step reads and writes, divided by the memory bandwidth that is measured in the same run.

--weights=bfloat16,int8 measures each model twice, with matrices in bfloat16 and in 8 bits, each row with a scale.

On a GPU in bfloat16, models decode by kernels where there are any for them: a few for each layer, or on an H100 or H200
one for all layers (docs/decoding_speed.md). The rows transformer_plain and t2r_plain decode without them.

DIR gets decode.jsonl (one line per measurement, appended), decode.json, decode.png and decode.svg.
"""

import os
from typing import Any

from absl import flags

from t2r.commands import _benchmark as shared

RESUMES = True  # after an interruption

_MODELS, _TOPOLOGY, _OUTPUT = shared.define_models(), shared.define_topology(), shared.define_output()
_WEIGHTS = flags.DEFINE_list("weights", None, "Types of the matrices: that of --dtype, which is the default, and int8.")
_STEPS = flags.DEFINE_integer("steps", 256, "Timed steps in each repetition.", lower_bound=1)
_WHOLE = flags.DEFINE_bool("whole", False, "Time all steps of a generation.")
_PROMPT = flags.DEFINE_integer("prompt", 0, "Language models: also time the prefill of N tokens.", lower_bound=0)
_BEAM = flags.DEFINE_integer("beam", 0, "Translation: also time steps of beam search, N beams a source.", lower_bound=0)
_SECONDS = flags.DEFINE_float(
    "seconds", 2.0, "Repeat each measurement for this time, and at least five times.", lower_bound=0
)
_LARGEST = flags.DEFINE_bool("largest_batch", False, "Also measure the largest batch that fits in memory.")
_LARGEST_AT = shared.define_numbers(
    "largest_batch_lengths", None, "Lengths for --largest_batch; default: 4096, or the longest."
)
_PEERS = flags.DEFINE_bool("peers", False, "Also measure other libraries, if installed.")
_PEER_LENGTHS = shared.define_numbers("peer_lengths", None, "Lengths for --peers; default: the shortest.")
_PEER_NAMES = flags.DEFINE_list(
    "peer_names",
    ["hugging_face", "hugging_face_static", "flash_linear_attention", "llama_cpp"],
    "Libraries for --peers; llama_cpp needs a --peer_model that is a GGUF file, and --batch=1.",
)

_PEER_MODEL = flags.DEFINE_string(
    "peer_model",
    None,
    "With --model: what it was imported from. The models of Hugging Face and llama.cpp get its weights.",
)


def main() -> dict[str, Any]:
    if _LARGEST.value and not _PEERS.value:  # JAX's default is 75% of the GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

    from t2r.benchmark.decode import DecodeOptions, benchmark_decode
    from t2r.errors import raise_all

    alone = {"peer_lengths": (_PEER_LENGTHS, _PEERS), "largest_batch_lengths": (_LARGEST_AT, _LARGEST)}
    alone |= {"peer_model": (_PEER_MODEL, _PEERS), "mesh": (_TOPOLOGY.mesh, _TOPOLOGY.topology)}
    useless = [
        f"--{name} needs --{other.name}" for name, (flag, other) in alone.items() if flag.value and not other.value
    ]
    if _PEER_NAMES.present and not _PEERS.value:  # it has a default
        useless.append("--peer_names needs --peers")
    raise_all("flags that do nothing alone:", useless)

    request = shared.request(_MODELS, weights=_WEIGHTS.value)
    peers = shared.parse_lengths(_PEER_LENGTHS.value or [str(request.lengths[0])]) if _PEERS.value else ()
    longest = [str(4096 if 4096 in request.lengths else request.lengths[-1])]
    largest = shared.parse_lengths(_LARGEST_AT.value or longest) if _LARGEST.value else ()
    options = DecodeOptions(_STEPS.value, _WHOLE.value, _SECONDS.value, _PROMPT.value, tuple(largest), _BEAM.value)
    target = shared.topology(_TOPOLOGY)
    peering = {"peer_lengths": peers, "peer_names": _PEER_NAMES.value, "peer_model": _PEER_MODEL.value}
    return benchmark_decode(request, options, shared.output(_OUTPUT), **peering, **target)
