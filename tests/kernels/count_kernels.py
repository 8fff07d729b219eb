"""Without a GPU: which kernels XLA makes of a decoding step, or of a part of a prompt, for an H200.

    pip install "jax[cuda12]"
    python tests/kernels/count_kernels.py NAME... [--beam=5] [--prompt=1024] [--kernels=]

NAME is one of the models of `measure_all_layers.py`, such as `smol`, 'smol int8' or `mt`. XLA compiles for a GPU that
is described to it. This says how many kernels run, not how long: `profile_steps.py` says that, on a GPU.
"""

import argparse
import os
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
os.environ["JAX_PLATFORMS"] = "cpu"
STEPS, LENGTH, BLOCKS_AT_ONCE = 64, 512, 132
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""
NO_KERNELS = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant")


def main() -> None:
    from measure_all_layers import configs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a part of a prompt of one sequence; 0: a step")
    parser.add_argument("--kernels", default="all", help="all, layers, or empty: without t2r's kernels")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name.removesuffix(" int8") not in configs()]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; choose from {', '.join(configs())}")
    for name in arguments.names:
        kernels = list(kernels_of(program(name, arguments).compile().as_text(), in_loop=not arguments.prompt))
        print(f"{name}: {len(kernels)} kernels", *kernels, sep="\n    ")


def program(name: str, arguments: argparse.Namespace):
    """The lowered program, for arrays that do not exist."""
    import jax
    from flax import nnx
    from measure_all_layers import configs

    from t2r.benchmark.models import abstract_inference_model
    from t2r.benchmark.steps import NO_STOP_TOKEN, TOKENS_OF_A_SEARCH, abstract_generation, abstract_search
    from t2r.decode.beam import Beam, search_steps
    from t2r.decode.generate import _pack, read_chunk, scan_steps
    from t2r.decode.sampling import Sampling
    from t2r.kernels.decoding import cuda
    from t2r.model.config import ModelConfig

    cuda.clusters_at_once = lambda ranks, threads, memory: BLOCKS_AT_ONCE // ranks
    config, weights = ModelConfig(**configs()[name.removesuffix(" int8")]), "int8" if name.endswith(" int8") else ""
    model = abstract_inference_model(config, "bfloat16", weights)
    (graph, arrays), on_gpu = nnx.split(model), described_gpu()
    if arguments.prompt:
        state = abstract_generation(model, 1, 8 * arguments.prompt).state
        parts = [jax.ShapeDtypeStruct((1, arguments.prompt), dtype) for dtype in (int, bool)]
        return read_chunk.lower(graph, *map(on_gpu, (arrays, state, *parts)))
    batch = 16 // arguments.beam * arguments.beam
    packed = None
    if arguments.kernels:
        packed = on_gpu(jax.eval_shape(lambda arrays: _pack(graph, arrays, arguments.kernels, batch), arrays))
    if arguments.beam == 1:
        start = on_gpu(abstract_generation(model, batch, LENGTH))
        return scan_steps.lower(graph, on_gpu(arrays), start, STEPS, Sampling(), NO_STOP_TOKEN, packed)
    beam = Beam(arguments.beam)
    start = on_gpu(abstract_search(model, batch // arguments.beam, LENGTH, beam, kernels=packed is not None))
    return search_steps.lower(graph, on_gpu(arrays), start, STEPS, TOKENS_OF_A_SEARCH, beam, packed)


def described_gpu():
    """A function that puts abstract arrays on the GPU that is described above."""
    import jax
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc("1x1x1", "cuda", target_config=H200, topology="1x1x1")
    except (RuntimeError, NotImplementedError) as error:
        raise SystemExit(f'there is no compiler for GPUs ({error}): pip install "jax[cuda12]"') from None
    gpu = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=gpu), tree)


def kernels_of(program_text: str, *, in_loop: bool):
    """The operations of a compiled program that are kernels or copies: those of its loop, or all outside loops."""
    loop = re.search(r"body=%([\w.\-]+)", program_text) if in_loop else None
    name = rf"%{re.escape(loop[1])}" if loop else "ENTRY"
    computation = re.search(rf"\n{name} .*?\n}}", program_text, re.DOTALL)[0]
    for line in computation.splitlines()[1:]:
        operation = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if operation and operation[3] not in NO_KERNELS:
            yield f"{operation[1]}: {operation[2][:80]}"


if __name__ == "__main__":
    main()
