"""Runs a CUDA kernel on a CPU, by emulated_gpu.hpp."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np


def emulate(
    folder: Path, source: str, macros: dict, inputs: list, updated: list, blocks: int, kernel: str = "decode_step"
) -> list[np.ndarray]:
    """Compiles a kernel for the CPU and runs it; returns the arrays that it updates.

    These are parameters twice, as XLA passes inputs and outputs.
    """
    types = [parameter.rsplit(" ", 1)[0] for parameter in macros["PARAMETERS"].split(", ")]
    casts = ", ".join(f"({kind}) pointers[{index}]" for index, kind in enumerate(types))
    program = [f'#include "{Path(__file__).with_name("emulated_gpu.hpp")}"']
    program += [f"#define {name} {value}" for name, value in macros.items()] + [source]
    program += [f"void call(void** pointers) {{ {kernel}({casts}); }}"]
    program += [
        f'extern "C" bool launch(void** pointers) {{ '
        f"return run(call, pointers, {blocks}, RANKS, THREADS, SHARED_MEMORY); }}"
    ]
    (folder / "program.cpp").write_text("\n".join(program))
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-o", "program.so", "program.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    inputs, updated = ([np.array(array) for array in arrays] for arrays in (inputs, updated))
    pointers = [array.ctypes.data for array in (*inputs, *updated, *updated)]
    launch = ctypes.CDLL(str(folder / "program.so")).launch
    launch.restype = ctypes.c_bool
    assert launch((ctypes.c_void_p * len(pointers))(*pointers)), "deadlock: all threads wait for each other"
    return updated
