"""On a GPU: which kernels a decoding step runs, and how long each takes.

    python tests/kernels/profile_steps.py NAME... [--beam=5] [--kernels=all] [--prompt=1024]

NAME is one of the models of `measure_all_layers.py`, such as `smol` or `mt`. With --beam, steps of a beam search; with
--prompt, each step reads so many tokens of a prompt of one sequence.
"""

import argparse
import collections
import functools
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
STEPS, PARTS = 64, 8  # decoding steps, and parts of a prompt


def main() -> None:
    from measure_all_layers import configs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--batch", type=int, default=0, help="sequences; 0: 16, or 15 with --beam")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a part of a prompt; 0: decoding steps")
    parser.add_argument("--kernels", default="", help="all or layers; empty: those that t2r chooses")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name.removesuffix(" int8") not in configs()]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; choose from {', '.join(configs())}, each also with ' int8'")
    for name in arguments.names:
        profile(name, arguments)


def profile(name: str, arguments: argparse.Namespace) -> None:
    from measure_all_layers import make, packed_for

    from t2r.benchmark import prefill, steps

    model, traces = make(name), []
    if arguments.prompt:
        prefill.time_calls = functools.partial(trace_call, traces)
        prefill.PromptReader(model, 1, arguments.prompt).measure(PARTS * arguments.prompt, prefill.PrefillOptions())
        return report(f"{name}, a prompt in parts of {arguments.prompt} tokens", traces[0], PARTS)
    batch = arguments.batch or (15 if model.config.encoder_layers else 16)
    decoder = steps.Decoder(model)
    if arguments.kernels:
        decoder._packed = lambda batch: packed_for(model, batch, arguments.kernels)
    steps.time_calls = functools.partial(trace_call, traces)
    if arguments.beam > 1:
        decoder.beam_steps(batch, arguments.length, STEPS, arguments.beam)
    else:
        decoder.steps(batch, arguments.length, STEPS)
    report(f"{name}, {batch} sequences, beam {arguments.beam}", traces[0])


def trace_call(traces: list, run, *, prepare, **_):
    """Takes the place of `time_calls`: two calls before the trace, one in it."""
    import jax

    from t2r.benchmark.shared import Timing

    for _ in range(2):
        jax.block_until_ready(run(prepare()))
    start = jax.block_until_ready(prepare())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run(start))
        (file,) = Path(directory).rglob("*.xplane.pb")
        traces.append(jax.profiler.ProfileData.from_file(str(file)))
    return Timing(1.0, 0.0, 1)


def report(title: str, trace, steps: int = STEPS) -> None:
    """Prints each kernel's time and count in a step; the time between kernels is what is left."""
    total, count, events = collections.Counter(), collections.Counter(), []
    for plane in trace.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                total[event.name] += event.duration_ns / 1e3 / steps
                count[event.name] += 1 / steps
                events.append((event.start_ns, event.start_ns + event.duration_ns))
    if not events:
        sys.exit("no kernel was found in the trace: is there a GPU?")
    span = (max(end for _, end in events) - min(start for start, _ in events)) / 1e3 / steps
    print(f"{title}: {span:.1f} µs a step, of which {sum(total.values()):.1f} in {sum(count.values()):.0f} kernels")
    for name, micros in total.most_common(45):
        print(f"  {micros:8.2f} µs {count[name]:6.2f} times  {name[:110]}")


if __name__ == "__main__":
    main()
