"""Compiling CUDA, and querying how many clusters of thread blocks a GPU can run at once.

The compiler is NVRTC, which comes with JAX for CUDA and needs neither a C++ compiler nor NVIDIA's headers.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

LIBRARY_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
# Values of enumerations in cuda.h.
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4


def compile_cuda(source: str, options: Sequence[str]) -> str:
    """Compiles CUDA to PTX; if that fails, raises RuntimeError with the compiler's log."""
    library = nvrtc()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None))
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), encoded)
    text = _read_text(library, program, "ProgramLog" if failed else "PTX")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"NVRTC could not compile a CUDA kernel:\n{text}")
    return text


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """The compiler's library; None if it is not installed."""
    for path in _library_paths():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _library_paths() -> Iterator[str]:
    """Where NVRTC may be: first in NVIDIA's Python packages, then in the system."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for name in LIBRARY_NAMES:
            yield from map(str, Path(root).glob(f"*/lib/{name}"))
    yield from LIBRARY_NAMES
    yield from (f"/usr/local/cuda/lib64/{name}" for name in LIBRARY_NAMES)


def _read_text(library: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> str:
    """A program's "PTX", or its "ProgramLog"."""
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{kind}")(program, buffer))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a call of CUDA failed with error {status}")


@functools.cache
def clusters_at_once(ranks: int, threads: int, memory: int) -> int:
    """How many clusters of `ranks` blocks of this size run at the same time.

    0 if there is no GPU or no compiler, or if the compiler is newer than the driver, which then cannot load its PTX.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver_version, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        _check(driver.cuDriverGetVersion(ctypes.byref(driver_version)))
        if nvrtc() is None or nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            return 0
        if major.value * 1000 + minor.value * 10 > driver_version.value:
            return 0
        return _max_active_clusters(driver, ranks, threads, memory)
    except (OSError, RuntimeError):
        return 0


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


def _max_active_clusters(driver: ctypes.CDLL, ranks: int, threads: int, memory: int) -> int:
    """The driver's answer for an empty kernel with this much shared memory, in bytes."""
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    clusters = ctypes.c_int()
    ptx = compile_cuda('extern "C" __global__ void empty() {}', ["--gpu-architecture=compute_90"])
    _check(driver.cuInit(0))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))  # the context that JAX uses
    _check(driver.cuCtxPushCurrent_v2(context))
    try:
        _check(driver.cuModuleLoadData(ctypes.byref(module), ptx.encode()))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"empty"))
        _check(driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, memory))
        cluster = _LaunchAttribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(ranks, 1, 1))
        launch = _LaunchConfig((ranks, 1, 1), (threads, 1, 1), memory, None, ctypes.pointer(cluster), 1)
        _check(driver.cuOccupancyMaxActiveClusters(ctypes.byref(clusters), function, ctypes.byref(launch)))
        _check(driver.cuModuleUnload(module))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(0)
    return clusters.value
