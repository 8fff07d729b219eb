"""Beam search reorders its beams after each step: all arrays of a state in place, in one kernel (CUDA).

XLA gathers the sequences of each array into another one, and copies that back: with 12 arrays, 19 launches, which take
longer than the work that they do.
"""

import math

from jaxtyping import Array, Int

from t2r.kernels.decoding import launch

THREADS = 256
MOST_BLOCKS = 32  # of an array
MOST_BEAMS = 24  # a thread has registers for 16 bytes of each


def reorder(arrays: list[Array], parents: Int[Array, "sequences"], beams: int) -> list[Array]:
    """The arrays with sequence parents[i] at i. `beams` consecutive sequences have their parents among themselves."""
    macros = definitions(arrays, beams)
    kernel, blocks = launch.compile_files("reorder.cu", macros=macros), macros["BLOCKS"] * len(arrays)
    return list(launch.call_in_place(kernel, "reorder", [parents], arrays, blocks=blocks, threads=THREADS))


def fits(arrays: list[Array], beams: int) -> bool:
    """Whether the kernel can move these arrays: sequences that are whole words of 4 bytes."""
    return 1 < beams <= MOST_BEAMS and all(_row_bytes(array) % 4 == 0 for array in arrays)


def definitions(arrays: list[Array], beams: int) -> dict[str, int | str]:
    """The macros that reorder.cu is compiled with. Arrays are parameters twice, and the same, as they are aliased."""
    sentences, cases, most_words = len(arrays[0]) // beams, [], 0
    for number, array in enumerate(arrays):
        size = 16 if _row_bytes(array) % 16 == 0 else 4
        words, word = _row_bytes(array) // size, "uint4" if size == 16 else "u32"
        most_words = max(most_words, words)
        cases.append(f"case {number}: reorder_array(parents, ({word}*)array{number}, {words}u); break;")
    parameters = [f"u32* {prefix}array{number}" for prefix in ("input_", "") for number in range(len(arrays))]
    return dict(
        THREADS=THREADS,
        ARRAYS=len(arrays),
        BLOCKS=min(MOST_BLOCKS, -(-sentences * most_words // THREADS)),
        SENTENCES=sentences,
        BEAMS=beams,
        PARAMETERS=", ".join(["const int* parents", *parameters]),
        CASES=" ".join(cases),
    )


def _row_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize
