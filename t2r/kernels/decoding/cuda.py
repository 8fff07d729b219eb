"""Compiling CUDA, and asking what a GPU has room for.

By NVRTC, which comes with JAX for CUDA and needs neither a C++ compiler nor NVIDIA's headers.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
MOST_SHARED_MEMORY, CLUSTER_SIZE = 8, 4  # as the driver numbers attributes of functions, and of launches


def compile_cuda(source: str, options: Sequence[str]) -> str:
    """CUDA → PTX."""
    library = nvrtc()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None))
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), given)
    text = _text(library, program, "ProgramLog" if failed else "PTX")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(text)
    return text


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """The compiler's library, where there is one."""
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _candidates() -> Iterator[str]:
    """Of NVIDIA's packages, then of the system."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for name in NAMES:
            yield from map(str, Path(root).glob(f"*/lib/{name}"))
    yield from NAMES
    yield from (f"/usr/local/cuda/lib64/{name}" for name in NAMES)


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA: error {status}")


@functools.cache
def clusters_at_once(ranks: int, threads: int, memory: int) -> int:
    """How many clusters of blocks of this size the GPU runs at the same time; 0 where there is none, or no compiler
    whose programs its driver knows."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        known, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        _check(driver.cuDriverGetVersion(ctypes.byref(known)))
        if nvrtc() is None or nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            return 0
        if major.value * 1000 + minor.value * 10 > known.value:
            return 0
        return _ask_driver(driver, ranks, threads, memory)
    except (OSError, RuntimeError):
        return 0


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _ask_driver(driver: ctypes.CDLL, ranks: int, threads: int, memory: int) -> int:
    context, module, function, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    ptx = compile_cuda('extern "C" __global__ void nothing() {}', ["--gpu-architecture=compute_90"])
    _check(driver.cuInit(0))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))  # JAX's own
    _check(driver.cuCtxPushCurrent_v2(context))
    try:
        _check(driver.cuModuleLoadData(ctypes.byref(module), ptx.encode()))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"nothing"))
        _check(driver.cuFuncSetAttribute(function, MOST_SHARED_MEMORY, memory))
        cluster = _Attribute(CLUSTER_SIZE, 0, (ctypes.c_uint * 16)(ranks, 1, 1))
        launch = _Launch((ranks, 1, 1), (threads, 1, 1), memory, None, ctypes.pointer(cluster), 1)
        _check(driver.cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(launch)))
        _check(driver.cuModuleUnload(module))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(0)
    return found.value
