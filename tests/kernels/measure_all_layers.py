"""On an H100 or H200: is the kernel of all layers right, how fast is it, and where does its time go?

    python tests/kernels/measure_all_layers.py --output=DIRECTORY [--only='check;smol'] [--seconds=270]

Each case runs in a child process. A case that hangs is stopped after its time, and the next one starts in a new child.
Results are lines of JSON in DIRECTORY/all_layers.jsonl.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
CASE_SECONDS = 60  # for one case; the first one of a child also loads JAX


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="parts of the names of cases, separated by semicolons")
    parser.add_argument("--seconds", type=float, default=270, help="no case starts later")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        run_child(arguments.child)
        return
    wanted = [part for part in arguments.only.split(";") if part]
    names = [name for name in cases() if not wanted or any(part in name for part in wanted)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    deadline, results = time.monotonic() + arguments.seconds, []
    with (arguments.output / "all_layers.jsonl").open("w") as file:

        def report(line: dict) -> None:
            results.append(line)
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        while names and time.monotonic() < deadline:
            done = run_in_child(names, deadline, report)
            names = names[done:]
        for name in names:
            report({"case": name, "error": "no time left"})
    for line in results:
        print(f"{line['case']:45} {line.get('summary') or line.get('error', '')[-200:]}")


def run_in_child(names: list[str], deadline: float, report) -> int:
    """Runs cases until one hangs or the child ends; returns how many were reported."""
    command = [sys.executable, "-u", __file__, "--output=.", "--child", *names]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue = queue.Queue()

    def read() -> None:
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    done, log, until = 0, [], time.monotonic() + CASE_SECONDS
    while done < len(names):
        try:
            line = lines.get(timeout=max(0.1, min(until, deadline) - time.monotonic()))
        except queue.Empty:
            child.kill()
            report({"case": names[done], "error": "stopped: it takes too long, or hangs", "log": "".join(log[-20:])})
            return done + 1
        if line is None:
            report({"case": names[done], "error": "the process ended: " + "".join(log[-30:])})
            return done + 1
        if line.startswith("RESULT "):
            report(json.loads(line.removeprefix("RESULT ")))
            done, log, until = done + 1, [], time.monotonic() + CASE_SECONDS
        else:
            log.append(line)
    child.wait()
    return done


def run_child(names: list[str]) -> None:
    for name in names:
        began = time.monotonic()
        try:
            line = cases()[name]()
        except Exception as error:
            import traceback

            line = {"error": "".join(traceback.format_exception(error))[-3000:]}
        print("RESULT " + json.dumps({"case": name, **line, "took": round(time.monotonic() - began, 1)}), flush=True)


# The cases.


def configs() -> dict:
    from t2r.benchmark.models import converted
    from t2r.model.config import AttentionSpec, preset

    t2r, merged = AttentionSpec("linear", "t2r", 32), AttentionSpec("merged", "t2r", 32)
    window, softmax = AttentionSpec("windowed", "t2r", 32, window=32, sinks=4), AttentionSpec()
    llama = dict(
        norm="rms", activation="swish", gated=True, bias=False, positions="rotary", scale_embedding=False,
        dtype="bfloat16",
    )  # fmt: skip
    smol = dict(llama, vocab_size=49_152, layers=30, width=576, heads=9, kv_heads=3, feedforward=1536)
    billion = dict(llama, vocab_size=128_256, layers=16, width=2048, heads=32, kv_heads=8, feedforward=8192)
    small = dict(llama, vocab_size=512, layers=3, width=192, heads=6, kv_heads=2, head_dim=64, feedforward=640)
    paper = dict(vocab_size=32_768, layers=32, width=1024, heads=8, feedforward=4096, dtype="bfloat16")
    hybrid = lambda layers: tuple(softmax if layer % 8 == 3 else window for layer in range(layers))  # noqa: E731
    return {
        "small": dict(small, attention=(t2r,)),
        "small window": dict(small, attention=(window,)),
        "small hybrid": dict(small, attention=(t2r, softmax, window)),
        "small paper": dict(
            paper, vocab_size=512, layers=3, width=256, heads=2, head_dim=128, feedforward=1024, attention=(merged,)
        ),
        "smol": dict(smol, attention=(t2r,)),
        "smol hybrid": dict(smol, attention=hybrid(30)),  # 4 of 30 layers are softmax
        "smol transformer": dict(smol, attention=(softmax,)),
        "llama": dict(billion, attention=(t2r,)),
        "llama hybrid": dict(billion, attention=hybrid(16)),  # 2 of 16
        "paper": dict(paper, attention=(merged,)),
        "mt": vars(converted(preset("paper_mt"), "t2r")),
        "small mt": vars(converted(preset("paper_mt", layers=2, encoder_layers=1, vocab_size=512), "t2r")),
    }


def cases() -> dict:
    checks = [("small", 5), ("small window", 16), ("small hybrid", 1), ("small hybrid", 16), ("small", 32)]
    checks += [("small paper", 16), ("small int8", 16), ("small mt", 15)]
    found = {f"check {name}, batch {batch}": lambda n=name, b=batch: check(n, b) for name, batch in checks}
    times = [("smol", 16, 512), ("llama", 16, 512), ("llama", 1, 512), ("smol", 1, 512), ("smol hybrid", 16, 4096)]
    times += [("smol int8", 16, 512), ("llama int8", 16, 512), ("llama int8", 1, 512)]
    times += [("paper", 16, 512), ("llama hybrid", 16, 4096), ("smol transformer", 16, 4096)]
    for name, batch, length in times:
        found[f"time {name}, batch {batch}"] = lambda n=name, b=batch, t=length: measure(n, b, t)
        if (name, batch) in (("smol", 16), ("llama", 16), ("smol hybrid", 16), ("llama int8", 16)):
            found[f"clocks {name}, batch {batch}"] = lambda n=name, b=batch, t=length: clocks(n, b, t)
    found["time mt, batch 15"] = lambda: measure("mt", 15, 512)
    found["time mt by kernels of each layer, batch 15"] = lambda: measure("mt", 15, 512, kernels="layers")
    grids = [("smol", dict(clusters=12)), ("smol", dict(clusters=8))]
    grids += [("smol", dict(clusters=24, ranks=4)), ("llama", dict(clusters=30, ranks=4))]
    grids += [("smol", dict(warps=warps)) for warps in (12, 16)] + [("llama", dict(warps=warps)) for warps in (10, 12)]
    grids += [("smol hybrid", dict(warps=12)), ("paper", dict(warps=12))]
    for name, grid in grids:
        label = ", ".join(f"{key} {value}" for key, value in grid.items())
        length = 4096 if "hybrid" in name else 512
        found[f"grid of {name}: {label}"] = lambda n=name, t=length, g=grid: measure_grid(n, 16, t, g)
    for name, batch, length in (("smol hybrid", 16, 4096), ("smol", 16, 512), ("llama", 16, 512)):
        found[f"plain {name}, batch {batch}"] = lambda n=name, b=batch, t=length: measure(n, b, t, plain=True)
    return found


def make(name: str):
    from t2r.benchmark.models import random_model
    from t2r.model.config import ModelConfig
    from t2r.model.rows import for_decoding

    model = random_model(ModelConfig(**configs()[name.removesuffix(" int8")]), "bfloat16")
    return for_decoding(model, "int8") if name.endswith(" int8") else model


def packed_for(model, batch: int, kernels: str = "all"):
    """The kernel's weights, even where another kernel would be chosen."""
    from flax import nnx

    from t2r.decode.generate import _pack

    return _pack(*nnx.split(model), kernels, batch)


def check(name: str, batch: int) -> dict:
    """Compares three steps of the kernel with the model's own, from its own state, with one sequence ended."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from t2r.kernels.decoding.fused_model import FusedModel
    from t2r.model.loss import source_states

    model = make(name)
    fast = FusedModel(model, packed_for(model, batch))
    tokens = jax.random.randint(jax.random.key(0), (batch, 48), 0, 512)
    mask = (jnp.arange(batch) != 1)[:, None]

    @jax.jit
    def begin(tokens):
        sources = source_states(model, tokens[: batch // 5, :20]) if model.config.encoder_layers else None  # 5 beams
        return model(tokens, state=model.init_state(batch, 64, sources))

    _, state = begin(tokens[:, :45])
    fast_step = jax.jit(lambda t, s: fast(t, state=s, mask=mask))
    plain_step = jax.jit(lambda t, s: model(t, state=s, mask=mask))
    errors, keep = [], np.asarray(mask[:, 0])
    for step in range(45, 48):
        wanted, new_state = plain_step(tokens[:, step : step + 1], state)
        actual, fast_state = fast_step(tokens[:, step : step + 1], state)
        errors.append(relative(np.asarray(actual, np.float32)[keep], np.asarray(wanted, np.float32)[keep]))
        leaves = zip(jax.tree.leaves(fast_state.layers), jax.tree.leaves(new_state.layers))
        errors += [relative(*(np.asarray(x, np.float32) for x in pair)) for pair in leaves]
        state = new_state
    worst = max(errors)
    return {"errors": errors, "right": worst < 0.05, "summary": f"{'right' if worst < 0.05 else 'WRONG'}: {worst:.4f}"}


def relative(actual, wanted) -> float:
    import numpy as np

    return float(np.sqrt(np.mean((actual - wanted) ** 2)) / (np.sqrt(np.mean(wanted**2)) + 1e-9))


def measure(name: str, batch: int, length: int, plain: bool = False, kernels: str = "all") -> dict:
    """µs of a whole greedy step, of its floor, and of the kernel alone."""
    from t2r.benchmark.floor import Machine, step_cost
    from t2r.benchmark.steps import Decoder

    model = make(name)
    decoder = Decoder(model, repeat_for=0.5, plain=plain)
    if not plain:
        decoder._packed = lambda batch: packed_for(model, batch, kernels)
    speed = decoder.steps(batch, length, 64)
    translates = bool(model.config.encoder_layers)
    floor = step_cost(model, batch, length, length if translates else 0).floor(Machine(4.47e12)) * 1e6
    micros = speed.step_seconds * 1e6
    line = {"step_us": micros, "floor_us": floor, "of_floor": floor / micros, "spread": speed.spread}
    line["summary"] = f"{micros:7.1f} µs a step, {floor / micros:.1%} of the floor ({floor:.1f})"
    if not plain and not translates:
        line["kernel_us"] = kernel_micros(model, batch, length)
        line["summary"] += f", kernel alone {line['kernel_us']:.1f}"
    return line


def measure_grid(name: str, batch: int, length: int, grid: dict) -> dict:
    """µs of the kernel alone with other numbers of blocks."""
    from t2r.kernels.decoding import all_layers, cuda

    grid = all_layers.Grid(**grid)
    if cuda.clusters_at_once(grid.ranks, grid.threads, grid.memory) < grid.clusters:
        return {"error": "so many blocks do not run at once"}
    micros = kernel_micros(make(name), batch, length, grid)
    return {"kernel_us": micros, "summary": f"kernel alone {micros:.1f}"}


def kernel_inputs(model, batch: int, length: int, grid):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from t2r.benchmark.steps import abstract_generation, random_generation, rewind

    generation = rewind(random_generation(abstract_generation(model, batch, length)), length - 8)
    x = 0.1 * jax.random.normal(jax.random.key(1), (batch, model.config.width), jnp.float32)
    from t2r.kernels.decoding import layers_packing

    graph, arrays = nnx.split(model)
    packed = jax.jit(lambda arrays: layers_packing.pack(nnx.merge(graph, arrays), batch, grid))(arrays)
    return graph, arrays, packed, generation.state.layers, x, jnp.full(batch, length - 8, jnp.int32)


def kernel_micros(model, batch: int, length: int, grid=None, rounds: int = 200) -> float:
    """µs of the kernel alone, with the conversion of the stream, in a loop on the device at one length."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from t2r.kernels.decoding import all_layers

    grid = grid or all_layers.grid_for(model)
    graph, arrays, packed, states, x, positions = kernel_inputs(model, batch, length, grid)
    keep = jnp.ones(batch, bool)

    @jax.jit
    def loop(arrays, packed, states, x):
        model = nnx.merge(graph, arrays)

        def body(_, carry):
            x, states = carry
            out, new, _ = all_layers.run(x, packed, states, keep, positions, model, grid)
            new = tuple(
                state._replace(index=old.index) if "index" in state._fields else state
                for state, old in zip(new, states)
            )
            return 1e-3 * out, new

        return jax.lax.fori_loop(0, rounds, body, (x, states))

    jax.block_until_ready(loop(arrays, packed, states, x))
    began = time.perf_counter()
    jax.block_until_ready(loop(arrays, packed, states, x))
    return (time.perf_counter() - began) / rounds * 1e6


PARTS = (
    "read the stream", "qkv product", "send qkv", "wait for qkv", "attention", "wait for attended", "out product",
    "barrier", "read the stream again", "up product", "send hidden", "wait for hidden", "down product", "last barrier",
)  # fmt: skip


def clocks(name: str, batch: int, length: int) -> dict:
    """Cycles between the marks of a layer, for the first block, which has a head, and for the last."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from t2r.kernels.decoding import all_layers

    model = make(name)
    grid = all_layers.grid_for(model)
    graph, arrays, packed, states, x, positions = kernel_inputs(model, batch, length, grid)

    @jax.jit
    def step(arrays, packed, states, x):
        model = nnx.merge(graph, arrays)
        return all_layers.run(x, packed, states, jnp.ones(batch, bool), positions, model, grid, clocks=True)[2]

    step(arrays, packed, states, x)
    times = np.asarray(step(arrays, packed, states, x)).reshape(-1, len(states), all_layers.CLOCK_POINTS)
    points = times.astype(np.int64)
    kinds = [block.attention.kind for block in model.blocks]
    line = {}
    for kind in sorted(set(kinds)):
        layers = [layer for layer in range(1, len(kinds)) if kinds[layer] == kind]
        for block in (0, 3, times.shape[0] - 1):
            own = points[block][layers]
            no_head = [0] * 7 + list(range(7, all_layers.CLOCK_POINTS))
            marks = np.where(own[:, 1:7].any(1, keepdims=True), own, own[:, no_head])
            parts = np.median(np.diff(marks, axis=1) % 2**32, axis=0)
            line[f"{kind}, block {block}"] = dict(zip(PARTS, parts.tolist()), total=float(parts.sum()))
    line["summary"] = "; ".join(f"{key}: {[round(x) for x in value.values()]}" for key, value in line.items())
    return line


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
