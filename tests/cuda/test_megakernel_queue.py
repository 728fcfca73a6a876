"""A queue of a megakernel on CUDA: what holds everywhere, and what only a GPU has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from queue_scenarios import *  # noqa: F403
from queue_scenarios import SCALE, SOURCES, Side

import brickline as bl
from brickline.errors import QueueError
from brickline.executor.megakernel.queue import Megakernel
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import gemv, residual


class CudaSide(Side):
    """Blocks of a GPU, and tensors of torch."""

    device = "CUDA:0"
    mode = "cooperative launch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.beside = torch.cuda.Stream()
        # While an item spins nothing may be allocated: the driver might wait for it.
        self.pinned = {
            torch.float32: torch.zeros(64).pin_memory(),
            torch.int32: torch.zeros(64, dtype=torch.int32).pin_memory(),
        }
        kept = [torch.zeros(size, device="cuda") for size in (16, 1 << 20)]
        torch.cuda.synchronize()
        del kept

    def array(self, values: Any) -> Any:
        return self.torch.from_numpy(values).cuda()

    def read(self, array: Any) -> Any:
        # In a stream of its own: nothing but the queue orders it.
        with self.torch.cuda.stream(self.beside):
            return array.cpu().numpy()

    def copy(self, values: Any, to: Any) -> None:
        to.copy_(self.torch.from_numpy(values))

    def fill(self, array: Any, value: float) -> None:
        # A copy, which needs no multiprocessor.
        values = self.pinned[array.dtype][: array.numel()].fill_(value)
        with self.torch.cuda.stream(self.beside):
            array.copy_(values, non_blocking=True)
        self.beside.synchronize()


@pytest.fixture
def side() -> CudaSide:
    return CudaSide()


def test_all_multiprocessors_and_many_items(side: CudaSide) -> None:
    x, y = side.ones(2000, 640), side.floats(2000, 640)
    with Megakernel("CUDA:0", [SCALE], slots=1 << 15) as mega:
        for by in (2.0, 3.0):
            mega.submit_many("scale", [x], [y], [640, by])
        report = mega.drain()
        facts = report.telemetry.known()
    np.testing.assert_array_equal(side.read(y), 3)
    assert report.items_processed == 40_000
    assert sum(worker.items > 0 for worker in report.workers) > 1
    assert facts["kernel_launches"] >= 1
    assert facts["bytes_uploaded"] > 4000 * 64
    assert facts["bytes_read_back"] > 4000 * 16
    assert 0 < facts["occupancy_bps"] <= 10_000


def test_two_blocks_on_a_multiprocessor(side: CudaSide) -> None:
    count = 2 * side.torch.cuda.get_device_properties(0).multi_processor_count - 1
    x, y = side.ones(500, 640), side.floats(500, 640)
    with Megakernel("CUDA:0", [SCALE], workers=count, slots=1 << 15) as mega:
        mega.submit_many("scale", [x], [y], [640, 2.0])
        assert mega.drain().items_processed == 5000
    np.testing.assert_array_equal(side.read(y), 2)


def test_kernels_of_the_catalog_give_the_bits_of_a_launch(side: CudaSide) -> None:
    rng = np.random.default_rng(0)
    import ml_dtypes

    w = rng.standard_normal((500, 2048)).astype(ml_dtypes.bfloat16)
    device = bl.open_device("CUDA:0")
    given = device.from_numpy(w), device.from_numpy(rng.random(2048).astype(ml_dtypes.bfloat16))
    expected, found = device.zeros((500,), "f32"), device.zeros((500,), "f32")
    kernel = gemv()
    bl.KernelCache().get_or_compile(kernel, device).launch(*given, expected, 500, 2048)
    device.synchronize()
    with Megakernel(device, [kernel, residual()]) as mega:
        mega.submit(kernel.name, given, [found], {"m": 500, "n": 2048})
        mega.submit("residual", [found, found], [device.zeros((500,), "f32")], [500])
        assert mega.drain().is_complete
    np.testing.assert_array_equal(device.to_numpy(found), device.to_numpy(expected))


def test_what_a_stream_writes_before_is_there(side: CudaSide) -> None:
    torch = side.torch
    x, y = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
    stream = torch.cuda.Stream()
    with Megakernel("CUDA:0", [SCALE], slots=4096) as mega:
        for turn in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                x.fill_(turn)
                if turn % 2:
                    mega.submit("scale", [x], [y], [1 << 16, 2.0])
            if turn % 2 == 0:
                mega.submit("scale", [x], [y], [1 << 16, 2.0], stream=stream)
            mega.drain()
            assert (y == 2 * turn).all()  # in the default stream


def test_a_device_that_is_waited_for_is_not_blocked(side: CudaSide) -> None:
    with Megakernel("CUDA:0", [SCALE]) as mega:
        mega.submit("scale", [side.ones(64)], [side.floats(64)], [64, 2.0])
        mega.drain()
        side.torch.cuda.synchronize()
        mega.submit("scale", [side.ones(64)], [side.floats(64)], [64, 2.0])
        assert mega.drain().telemetry.known()["kernel_launches"] == 1


HANG = """
import sys, time, os
sys.path.insert(0, {path!r})
from queue_scenarios import SOURCES
import torch
from brickline.errors import DeviceHung
from brickline.executor.megakernel.queue import Megakernel
made = Megakernel("CUDA:0", SOURCES, workers=2, slots=64)
gate, y = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")
z = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
bad = made.submit("spin", writes=[gate, y])
waiter = made.submit("scale", [y], [z], [1, 1.0])
began = time.monotonic()
took = 99
try:
    made.drain(max_wall_time=0.3)
except DeviceHung as error:
    took = time.monotonic() - began
    print(error, flush=True)
    facts = error.task, error.item, error.worker in (0, 1), error.missing, made.state
    print("facts", *facts, flush=True)
    try:
        made.submit("scale", [y], [z], [1, 1.0])
    except DeviceHung:
        print("again", flush=True)
print("took", took, flush=True)
os._exit(0 if took < 2.3 else 1)
"""


def test_an_op_that_never_returns_is_named() -> None:
    path = str(__import__("queue_scenarios").__file__).rsplit("/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", HANG.format(path=path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "item 0 of submission 0 (op spin) on worker" in done.stdout
    assert "submission 1 waits for submission 0" in done.stdout
    assert "the CUDA context cannot survive it" in done.stdout
    assert "facts 0 0 True 0 dead" in done.stdout
    assert "again" in done.stdout


# ---------------------------------------------------------------------------------------- bad input


def test_memory_of_elsewhere_is_refused(side: CudaSide) -> None:
    with side.mega() as mega:
        with pytest.raises(QueueError, match=r"MK507: .*expected memory of CUDA:0, got .*CPU"):
            mega.submit("scale", [np.ones(64, np.float32)], [side.floats(64)], [64, 1.0])
        assert mega.drain().items_processed == 0
    with (
        Megakernel("CPU", SOURCES, workers=1) as host,
        pytest.raises(QueueError, match=r"MK507: .*expected memory of the host, got .*CUDA:0"),
    ):
        host.submit("scale", [side.ones(64)], [np.ones(64, np.float32)], [64, 1.0])
    with (
        Megakernel("CPU", SOURCES, workers=1) as host,
        pytest.raises(QueueError, match=r"stream: MK511: .*a CPU has no streams"),
    ):
        host.submit(
            "scale", [np.ones(64, np.float32)], [np.ones(64, np.float32)], [64, 1.0], stream=3
        )


def test_what_a_worker_cannot_run_is_refused_with_a_code() -> None:
    def odd(**more: Any) -> Kernel:
        return Kernel(
            "odd",
            "BRICKLINE void odd(Block& block, float* y, int64_t n) { y[0] = 1; }",
            [Param("y", "f32", "n", "write"), Scalar("n", low=1, high=64)],
            **more,
        )

    with pytest.raises(QueueError, match=r"MK501: .*multiple of 32 up to 1024, got 48"):
        Megakernel("CUDA:0", [odd(local_size=48)])
    with pytest.raises(QueueError, match=r"MK501: .*depends on no argument"):
        Megakernel("CUDA:0", [odd(local_size="n")])
    with pytest.raises(QueueError, match=r"MK501: .*bytes of shared memory, got 1048576"):
        Megakernel("CUDA:0", [odd(shared_bytes=1 << 20)])
    with pytest.raises(QueueError, match=r"workers: MK511: .*beside one that takes submissions"):
        Megakernel("CUDA:0", [odd(local_size=1024)], workers=4000)
    with pytest.raises(QueueError, match=r"workers: MK511: .*got 100000"):
        Megakernel("CUDA:0", [odd()], workers=100_000)
    with pytest.raises(QueueError, match=r"MK504"):
        Megakernel("CUDA:0", [odd()], memory_budget=1000)
