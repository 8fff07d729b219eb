"""The CUDA files of this folder as operations of XLA: compiled for the sizes at hand, and called on arrays in place."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from t2r.kernels.decoding import cuda


def source(*names: str) -> str:
    """The text of files in this folder, one after the other."""
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


def compile_files(*names: str, macros: dict[str, Any], rounded_division: bool = False) -> str:
    """PTX of a kernel in these files, with hopper.cuh before them and these macros.

    With `rounded_division`, the last two bits of quotients may be wrong: there is no slow path for numbers that do not
    occur.
    """
    return _compile(names, tuple(macros.items()), rounded_division)


@functools.cache
def _compile(names: tuple[str, ...], macros: tuple[tuple[str, Any], ...], rounded_division: bool) -> str:
    options = ["--gpu-architecture=compute_90", "--std=c++17", "-default-device"]
    options += ["--prec-div=false"] * rounded_division
    defined = "\n".join(f"#define {name} {value}" for name, value in macros)
    return cuda.compile_cuda(f"{defined}\n{source('hopper.cuh', *names)}", options)


def call_in_place(
    kernel: str,
    name: str,
    inputs: Sequence[Any],
    updated: Sequence[Array],
    *,
    blocks: int,
    threads: int,
    memory: int = 0,
) -> Sequence[Array]:
    """Runs the function `name` of a compiled kernel, with `memory` bytes of shared memory for each block.

    It reads `inputs` and changes `updated`, which it gets twice, as XLA passes inputs and outputs: both are the same.
    """
    call = jax.ffi.ffi_call(
        "__gpu$xla.gpu.ptx",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated],
        input_output_aliases={len(inputs) + index: index for index in range(len(updated))},
    )
    size = dict(grid_x=blocks, grid_y=1, grid_z=1, block_x=threads, block_y=1, block_z=1, shared_mem_bytes=memory)
    launch = {key: np.int32(value) for key, value in size.items()}
    return call(*inputs, *updated, name=name, kernel_type="ptx", kernel_data=kernel, **launch)
