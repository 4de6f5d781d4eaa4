"""Test which errors count as out of memory, and what is freed after one."""

import errno
import gc
import resource
import subprocess
import sys
import weakref

import pytest
import torch

from headway.common import scope
from headway.core.memory import oom
from headway.core.memory.oom import clear_device_cache, free_memory_of_failure, is_out_of_memory, release_memory
from headway.core.runtime.device import HARDWARE
from tests.unit.core.memory.simulated import SimulatedAllocator

REAL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15 GiB"),
    torch.cuda.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity)"),
    RuntimeError("CUDA out of memory."),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17 GB, other allocations: 1 GB, max allowed: 18.13 GB)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. The workspace is out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    RuntimeError("unable to mmap 400 bytes from file <weights>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000) and data type float64"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: cudnnBackendExecute failed with CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cudss error: CUDSS_STATUS_ALLOC_FAILED, when calling `cudssCreate(handle)`"),
    RuntimeError("CUDA error: resource allocation failed when calling `cusparseCreate(handle)`"),
    RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
                 "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."),
    RuntimeError("radix_sort: failed on 1st step: cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("RuntimeError: Triton Error [CUDA]: out of memory"),
    RuntimeError("backend='inductor' raised:\nRuntimeError: Triton Error [CUDA]: out of memory"),
    RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    RuntimeError("/te/common/util/cuda_driver.cpp:51 in function call: CUDA Error: out of memory"),
    RuntimeError("NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
                 "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
                 "Last error:\nFailed to CUDA calloc 10485760 bytes"),
    RuntimeError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes"),
    RuntimeError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nFailed to CUDA host alloc 4096 bytes"),
    RuntimeError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nHIP failure: 'out of memory'"),
    RuntimeError("Invalid buffer size: 24.00 GiB"),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                 "RuntimeError: CUDA out of memory. Tried to allocate 2 bytes"),
    MemoryError("Caught MemoryError in DataLoader worker process 0."),
]  # fmt: skip

# Includes messages with several possible reasons (see AMBIGUOUS), because no device is short of memory here.
OTHER = [
    RuntimeError("the run before this one died of 'CUDA out of memory': use a smaller batch"),
    ValueError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    KeyError("out of memory"),
    RuntimeError("memory format channels_last is not supported for 3-d tensors"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("out of resource: shared memory, Required: 98304, Hardware limit: 65536"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: invalid device function"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART"),
    RuntimeError("cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
    RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    RuntimeError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\nFailed to open libibverbs.so[.1]"
    ),
    RuntimeError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 999 'unknown error'"
    ),
    RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."
    ),
    RuntimeError("not enough memory slots in the table"),
    RuntimeError(
        "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location."
    ),
    RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:52427"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt("CUDA out of memory."),
    SystemExit("CUDA out of memory."),
]


@pytest.mark.parametrize("error", REAL, ids=lambda error: str(error)[:50])
def test_out_of_memory_errors_are_recognized(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=lambda error: str(error)[:50])
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


AMBIGUOUS = [
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"),
    RuntimeError("HIP error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    RuntimeError("CUDA error: insufficient resources when calling `cusparseSpGEMM_compute(handle)`"),
    RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
]


@pytest.fixture
def simulated(monkeypatch):
    """Simulate a GPU with 1 TiB, of which 1 GiB is in use, and return its allocator."""
    allocator = SimulatedAllocator(1 << 40)
    allocator.malloc(1 << 30)
    scope.drop(oom._CountedErrors)
    monkeypatch.setattr(oom, "HARDWARE", {"cuda": HARDWARE["cuda"]})
    monkeypatch.setattr(torch, "get_device_module", lambda kind: allocator)
    return allocator


@pytest.mark.parametrize("error", AMBIGUOUS, ids=lambda error: str(error)[:50])
def test_ambiguous_messages_count_only_if_memory_is_short(simulated, error):
    assert not is_out_of_memory(error), "most memory is free, and nothing has run out"
    catch_error(lambda: simulated.malloc(1 << 41))  # a library can catch this error
    assert is_out_of_memory(error)
    assert is_out_of_memory(error), "a second call must give the same answer"
    free_memory_of_failure(error)
    assert not is_out_of_memory(error), "an allocation failed, but memory has been freed since then"
    simulated.malloc((1 << 40) - (1 << 30) - (100 << 20))
    assert is_out_of_memory(error), "too little memory is left for the handle of a library"
    assert not is_out_of_memory(OTHER[0]), "an unrelated message does not count, even if the device is full"


def test_device_that_no_longer_answers_is_no_evidence(simulated):
    simulated.memory_stats = lambda device: (_ for _ in ()).throw(
        RuntimeError("CUDA error: device-side assert triggered")
    )
    assert not is_out_of_memory(AMBIGUOUS[2])


def catch_error(function):
    try:
        function()
    except BaseException as error:
        return error


def test_failures_of_this_machine_are_recognized():
    huge = 2**62
    assert is_out_of_memory(catch_error(lambda: torch.empty(huge, dtype=torch.uint8)))
    assert is_out_of_memory(catch_error(lambda: bytearray(2**62)))
    assert not is_out_of_memory(catch_error(lambda: torch.empty(-1)))


def chain_errors(outer, inner, *, cause=False, suppressed=False):
    if cause:
        outer.__cause__ = inner
    else:
        outer.__context__ = inner
        outer.__suppress_context__ = suppressed
    return outer


def test_causes_and_contexts_count():
    assert is_out_of_memory(chain_errors(ValueError("the step failed"), MemoryError(), cause=True))
    assert is_out_of_memory(chain_errors(ValueError("cleaning up failed"), MemoryError()))
    assert is_out_of_memory(chain_errors(ValueError("b"), chain_errors(KeyError("a"), MemoryError()), cause=True))
    assert not is_out_of_memory(chain_errors(ValueError("something else"), MemoryError(), suppressed=True))
    assert not is_out_of_memory(chain_errors(KeyboardInterrupt(), MemoryError()))
    loop = ValueError("a")
    chain_errors(loop, chain_errors(KeyError("b"), loop))
    assert not is_out_of_memory(loop)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_group_counts_if_every_member_does():
    from builtins import ExceptionGroup

    assert is_out_of_memory(ExceptionGroup("both", [MemoryError(), RuntimeError("CUDA out of memory.")]))
    assert not is_out_of_memory(ExceptionGroup("one", [MemoryError(), ValueError("a mistake")]))
    assert is_out_of_memory(ExceptionGroup("nested", [ExceptionGroup("inner", [MemoryError()])]))
    shared = MemoryError()
    members = [chain_errors(RuntimeError(name), shared, cause=True) for name in ("a", "b")]
    assert is_out_of_memory(ExceptionGroup("one cause", members))


def test_frames_are_cleared_before_the_cache(monkeypatch):
    held, alive_at_clearing = [], []

    def inner():
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        raise MemoryError("inner")

    def middle():
        other = torch.ones(1000)
        held.append(weakref.ref(other))
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError("middle") from error

    from headway.core.memory import oom

    monkeypatch.setattr(oom, "clear_device_cache", lambda **_: alive_at_clearing.append([ref() for ref in held]))
    error = catch_error(middle)
    assert all(ref() is not None for ref in held), "the traceback must keep the tensors alive"
    free_memory_of_failure(error)
    assert alive_at_clearing == [[None, None]]
    assert error.__traceback__ is None
    assert error.__cause__.__traceback__ is None


def test_frames_that_still_run_keep_their_variables():
    mine = torch.ones(3)
    error = catch_error(lambda: torch.empty(2**62, dtype=torch.uint8))
    free_memory_of_failure(error)
    assert mine.sum() == 3


def test_release_memory_returns_none_values_and_accepts_errors():
    assert release_memory() == []
    assert release_memory(1, torch.ones(2)) == [None, None]

    def fail():
        tensor = torch.ones(10)
        fail.ref = weakref.ref(tensor)
        raise MemoryError

    error = catch_error(fail)
    assert fail.ref() is not None
    (error,) = release_memory(error)
    assert error is None
    assert fail.ref() is None


def test_reference_cycles_are_freed_only_on_request():
    gc.disable()
    try:
        loop = [torch.ones(10)]
        loop.append(loop)
        ref = weakref.ref(loop[0])
        del loop
        clear_device_cache()
        assert ref() is not None
        clear_device_cache(garbage_collection=True)
        assert ref() is None
    finally:
        gc.enable()


FLAT = """
import resource, psutil, torch
from headway.core.memory.oom import free_memory_of_failure, is_out_of_memory

process = psutil.Process()
limit = process.memory_info().vms + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

def fail():
    kept = []
    loop = [kept]
    loop.append(loop)
    while True:
        kept.append(torch.ones(20 * 2**20, dtype=torch.uint8) + 0)
        kept.extend(torch.ones(2**14) for _ in range(100))

resident = []
for _ in range(21):
    try:
        fail()
    except Exception as error:
        assert is_out_of_memory(error), error
        free_memory_of_failure(error)
    resident.append(process.memory_info().rss)
print((max(resident[1:]) - resident[0]) // 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs RLIMIT_AS")
def test_resident_memory_is_flat_over_twenty_real_failures():
    result = subprocess.run([sys.executable, "-c", FLAT], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 40, "memory of failed attempts, up to 400 MiB each, was not freed"
