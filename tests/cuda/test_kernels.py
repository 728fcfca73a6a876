"""The CUDA device: compiling, memory, launches and the kernels that ship, on a real GPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from brickline.buffers import as_buffer
from brickline.cache import KernelCache
from brickline.device.base import Device, open_device
from brickline.errors import CompileError, DeviceError, LaunchError, SymbolicError
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import gemv, residual, rms_norm, silu_gate, softmax
from brickline.launching import launch_guarded

SCALE = """
BRICKLINE void scale(Block& block, float* x, int64_t n, float by) {
    const int64_t first = block.index() * 1024, left = n - first;
    block.each(left < 1024 ? left : 1024, [&](int64_t i) { x[first + i] *= by; });
}
"""


def scale() -> Kernel:
    signature = [Param("x", "f32", "n", "read-write"), Scalar("n", low=1), Scalar("by", "f32")]
    return Kernel("scale", SCALE, signature, global_size="ceil_div(n, 1024)")


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("CUDA:0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels") / "cache")


def test_memory_goes_there_and_back(device):
    array = np.arange(10_000, dtype=np.int32).reshape(100, 100)
    buffer = device.from_numpy(array)
    assert (buffer.device, buffer.shape, buffer.dtype) == ("CUDA:0", (100, 100), "i32")
    assert buffer.address % 256 == 0
    assert np.array_equal(device.to_numpy(buffer), array)
    with pytest.raises(LaunchError, match="is not host memory"):
        buffer.numpy()


def test_torch_and_cupy_share_memory_without_a_copy(torch, device):
    tensor = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    buffer = as_buffer(tensor)
    assert (buffer.address, buffer.shape, buffer.device) == (tensor.data_ptr(), (3, 4), "CUDA:0")
    assert torch.from_dlpack(buffer).data_ptr() == tensor.data_ptr()
    own = device.from_numpy(np.ones(5, np.float32))
    shared = torch.as_tensor(own, device="cuda")
    shared += 1
    assert device.to_numpy(own).tolist() == [2.0] * 5
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(6, dtype=cupy.float32)
    assert as_buffer(array).address == array.data.ptr
    assert cupy.asarray(own).data.ptr == own.address


def test_a_kernel_runs_in_torchs_current_stream(torch, cache):
    launch = cache.get_or_compile(scale(), "CUDA:0").launch
    x = torch.ones(5000, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        launch(x, 5000, 3.0)
        event = torch.cuda.Event()
        event.record()
    assert not event.query()  # behind the sleep, so in the same stream
    stream.synchronize()
    assert x.sum().item() == 15000
    launch(x=x, n=5000, by=2.0, stream=stream)
    launch(x=x, n=5000, by=2.0, stream=stream.cuda_stream)
    stream.synchronize()
    assert x.sum().item() == 60000


def test_a_launch_can_be_captured(torch, cache):
    launch = cache.get_or_compile(scale(), "CUDA:0").launch
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, 1000, 2.0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == 8.0


def test_host_memory_is_refused(cache):
    launch = cache.get_or_compile(scale(), "CUDA:0").launch
    with pytest.raises(LaunchError, match="compiled for CUDA:0; x lies on CPU"):
        launch(np.ones(8, np.float32), 8, 1.0)


def test_sizes_beyond_the_device_are_refused(device, cache):
    wide = Kernel("wide", SCALE.replace("scale", "wide"), scale().signature, local_size=2048)
    buffer = device.from_numpy(np.ones(8, np.float32))
    with pytest.raises(LaunchError, match=r"local_size\[0\] = 2048 is 2048 .*CUDA:0 takes"):
        cache.get_or_compile(wide, "CUDA:0").launch(buffer, 8, 1.0)
    with pytest.raises(SymbolicError, match="variable n"):
        cache.get_or_compile(scale(), "CUDA:0").launch(buffer, 0, 1.0)


def test_a_source_that_does_not_compile_shows_its_line(cache):
    source = SCALE.replace("scale", "bad").replace("n - first", "zork")
    bad = Kernel("bad", source, scale().signature)
    with pytest.raises(CompileError, match=r"line 3: .*zork.*\n.*\n.*\n>    3 \|"):
        cache.get_or_compile(bad, "CUDA:0")


def test_plain_c_is_refused(cache):
    kernel = Kernel(
        "f", "void f(float* x) { x[0] = 1; }", [Param("x", "f32", 1, "write")], language="c"
    )
    with pytest.raises(DeviceError, match="plain C"):
        cache.get_or_compile(kernel, "CUDA:0")


def test_plain_cuda_runs_as_it_is(torch, cache):
    source = """
    extern "C" __global__ void axpy(int n, float a, const float* x, float* y) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] += a * x[i];
    }
    """
    signature = [
        Scalar("n", "i32", low=1),
        Scalar("a", "f32"),
        Param("x", "f32", "n"),
        Param("y", "f32", "n", "read-write"),
    ]
    kernel = Kernel(
        "axpy", source, signature, global_size="ceil_div(n, 128)", local_size=128, language="cuda"
    )
    cached = cache.get_or_compile(kernel, "CUDA:0")
    assert cached.resources["registers"] > 0
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    cached.launch(1000, 2.5, x, y)
    torch.cuda.synchronize()
    assert torch.equal(y, 2.5 * x)


def test_a_fault_is_raised_at_the_next_synchronize(device, cache):
    source = "BRICKLINE void faulty(Block& block, float* x) { block.fault(77); }"
    kernel = Kernel("faulty", source, [Param("x", "f32", 1, "write")], global_size=64)
    buffer = device.from_numpy(np.ones(1, np.float32))
    cache.get_or_compile(kernel, "CUDA:0").launch(buffer)
    with pytest.raises(LaunchError, match="fault 77"):
        device.synchronize()
    device.synchronize()


def test_guard_zones_find_a_write_out_of_bounds(device, cache):
    source = "BRICKLINE void over(Block& block, float* x, int64_t n) { x[n + 1] = 1; }"
    kernel = Kernel("over", source, [Param("x", "f32", "n", "write"), Scalar("n")])
    cached = cache.get_or_compile(kernel, "CUDA:0")
    buffer = device.from_numpy(np.ones(16, np.float32))
    with pytest.raises(LaunchError, match=r"writes outside x, .* first 4 bytes after its end"):
        launch_guarded(cached, {"x": buffer, "n": 16})


def test_events_time_what_lies_between_them(torch, device):
    a = torch.randn(4096, 4096, device="cuda")
    torch.mm(a, a)
    first, second = device.event(), device.event()
    mine = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    mine[0].record()
    first.record()
    for _ in range(10):
        torch.mm(a, a)
    second.record()
    mine[1].record()
    second.wait()
    torch.cuda.synchronize()
    assert second.ns_since(first) == pytest.approx(mine[0].elapsed_time(mine[1]) * 1e6, rel=0.05)
    with pytest.raises(DeviceError, match="expected an event of CUDA:0"):
        second.ns_since(open_device("CPU").event())


def test_a_new_thread_may_launch(device, cache):
    cached = cache.get_or_compile(scale(), "CUDA:0")
    buffer = device.from_numpy(np.ones(4096, np.float32))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            cached.launch(buffer, 4096, 2.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert device.to_numpy(buffer)[0] == 16.0


def test_a_warm_cache_compiles_nothing(cache):
    cache.get_or_compile(scale(), "CUDA:0")
    again = KernelCache(cache.directory)
    assert again.get_or_compile(scale(), "CUDA:0").entry_point
    assert (again.statistics.compilations, again.statistics.disk_hits) == (0, 1)


# ------------------------------------------------------------------------- the kernels that ship


def random(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray[Any, Any]:
    from brickline.dtypes import dtype_of

    return rng.standard_normal(shape).astype(np.float32).astype(dtype_of(dtype).numpy)


CASES = [
    ("rms_norm", {"rows": 3, "n": 2048, "eps": 1e-5}),
    ("rms_norm", {"rows": 1, "n": 4097, "eps": 1e-6}),
    ("softmax", {"rows": 32, "n": 1024}),
    ("softmax", {"rows": 2, "n": 5001}),
    ("silu_gate", {"n": 8192}),
    ("silu_gate", {"n": 1027}),
    ("residual", {"n": 8191}),
    ("gemv", {"m": 256, "n": 2048}),
    ("gemv", {"m": 33, "n": 1000}),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("name", "values"), CASES)
def test_a_shipped_kernel_is_right_and_the_cpus_twin(device, cache, name, values, dtype):
    makers = {"rms_norm": rms_norm, "softmax": softmax, "silu_gate": silu_gate}
    makers |= {"residual": residual, "gemv": gemv}
    kernel = makers[name](dtype)
    rng = np.random.default_rng(7)
    on_host, on_device = dict(values), dict(values)
    inputs: dict[str, Any] = {}
    for param in kernel.params:
        shape = [size.evaluate(values) for size in param.shape]
        array = random(rng, shape, param.dtype)
        if param.access == "read":
            inputs[param.name] = array.astype(np.float32) if dtype == "bf16" else array
        on_host[param.name] = as_buffer(array.copy())
        on_device[param.name] = device.from_numpy(array)
    cache.get_or_compile(kernel, "CPU").launch(**on_host)
    cache.get_or_compile(kernel, "CUDA:0").launch(**on_device)
    out = kernel.params[kernel.outs[0]]
    cpu = on_host[out.name].numpy().astype(np.float64)
    cuda = device.to_numpy(on_device[out.name]).astype(np.float64)
    expected = kernel.reference(**inputs, **values).astype(np.float64)
    scale_of = np.linalg.norm(expected)
    bound = 5e-6 if out.dtype == "f32" else 5e-3
    assert np.linalg.norm(cuda - expected) <= bound * scale_of
    assert np.array_equal(cpu, cuda)  # the same bits: exp is brickline's own on both
