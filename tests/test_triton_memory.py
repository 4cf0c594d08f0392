# ruff: noqa: N803  # a kernel's constexpr parameters are capitals, as everywhere in Triton
"""A Triton kernel on a CPU stops before it touches memory that is not its launch's."""

import pytest

from pagebench.kernels.triton_interpreter import activate

INTERPRETED = activate()

import torch  # noqa: E402  # triton must not be imported before activate(), and torch may import it
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pagebench.kernels import triton_memory  # noqa: E402
from pagebench.kernels.launch_buffers import MemoryFault, torch_pointer_table  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: a GPU is present")


@triton.jit
def copy_kernel(x, y, start, n, MASKED: tl.constexpr, N: tl.constexpr):
    i = start + tl.arange(0, N)
    if MASKED:
        tl.store(y + tl.arange(0, N), tl.load(x + i, mask=(i >= 0) & (i < n), other=7))
    else:
        tl.store(y + tl.arange(0, N), tl.load(x + i))


@triton.jit
def store_kernel(x, start, n, N: tl.constexpr):
    i = start + tl.arange(0, N)
    tl.store(x + i, 1, mask=i < n)


@triton.jit
def atomic_kernel(x, start, n, N: tl.constexpr):
    i = start + tl.arange(0, N)
    tl.atomic_add(x + i, 1, mask=i < n)


@triton.jit
def cas_kernel(x, start):
    tl.atomic_cas(x + start, 0, 1)


FAULTS = {
    "load one before": ("load", -1, lambda x: copy_kernel[(1,)](x, x.clone(), -1, 0, MASKED=False, N=8)),
    "load one past": ("load", 8, lambda x: copy_kernel[(1,)](x, x.clone(), 1, 0, MASKED=False, N=8)),
    "masked load one past": ("load", 8, lambda x: copy_kernel[(1,)](x, x.clone(), 4, 9, MASKED=True, N=8)),
    "store one before": ("store", -1, lambda x: store_kernel[(1,)](x, -1, 8, N=8)),
    "store one past": ("store", 8, lambda x: store_kernel[(1,)](x, 4, 9, N=8)),
    "atomic one before": ("atomic", -1, lambda x: atomic_kernel[(1,)](x, -1, 8, N=8)),
    "atomic one past": ("atomic", 8, lambda x: atomic_kernel[(1,)](x, 1, 9, N=8)),
    "compare-and-swap past": ("atomic", 8, lambda x: cas_kernel[(1,)](x, 8)),
    "wild store": ("store", None, lambda x: store_kernel[(1,)](x, 1 << 40, 1 << 50, N=8)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_raised_before_the_access_and_leaves_no_trace(fault: str) -> None:
    kind, index, launch = FAULTS[fault]
    storage = torch.zeros(24, dtype=torch.int32)
    x = storage[8:16]  # its neighbours are in the same storage, and not the kernel's
    with pytest.raises(MemoryFault) as caught:
        launch(x)
    assert (caught.value.kind, caught.value.index, caught.value.size) == (kind, index, 4)
    assert caught.value.program == (0, 0, 0)
    assert "test_triton_memory.py" in str(caught.value)
    assert not storage.any()
    y = torch.empty(8, dtype=torch.int32)
    copy_kernel[(1,)](x, y, 4, 8, MASKED=True, N=8)
    assert y.tolist() == [0, 0, 0, 0, 7, 7, 7, 7]


def test_fault_names_kernel_buffer_and_line() -> None:
    with pytest.raises(MemoryFault, match=r"store_kernel: .*'x' at element 8 of 8.*tl\.store\(x \+ i, 1, mask=i < n\)"):
        store_kernel[(1,)](torch.zeros(8), 4, 9, N=8)


def test_masked_off_lanes_may_point_anywhere() -> None:
    x = torch.zeros(8)
    store_kernel[(1,)](x, -4, -4, N=8)
    store_kernel[(1,)](x, 0, 3, N=1024)
    assert x.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_two_views_of_one_storage_are_both_live() -> None:
    storage = torch.arange(16, dtype=torch.int32)
    copy_kernel[(1,)](storage[:8], storage[8:], 0, 0, MASKED=False, N=8)
    assert storage.tolist() == [*range(8), *range(8)]


def test_strided_view_is_written_in_place() -> None:
    cache = torch.zeros(4, 2, 8)
    store_kernel[(1,)](cache[:, 1], 0, 8, N=8)
    assert cache[0, 1].eq(1).all()
    assert cache.sum() == 8


@triton.jit
def table_kernel(table, out, n, INNER: tl.constexpr):
    p = tl.program_id(0)
    base = tl.load(table + p).to(tl.pointer_type(tl.uint8))
    i = tl.arange(0, INNER)
    tl.store(out + p * INNER + i, tl.load(base + i, mask=i < n))


def test_pointer_table_reaches_its_targets_and_nothing_else() -> None:
    layers = [torch.full((8,), i, dtype=torch.uint8) for i in range(3)]
    table, out = torch_pointer_table(layers), torch.zeros(3, 8, dtype=torch.uint8)
    table_kernel[(3,)](table, out, 8, INNER=8)
    assert out[:, 0].tolist() == [0, 1, 2]
    with pytest.raises(MemoryFault, match=r"'table\[\d\]' at element (8|-\d+) of 8"):
        table_kernel[(3,)](table, torch.zeros(3, 16, dtype=torch.uint8), 9, INNER=16)
    table[1] = 12345
    with pytest.raises(MemoryFault, match="near no buffer") as caught:
        table_kernel[(3,)](table, out, 8, INNER=8)
    assert caught.value.program == (1, 0, 0)


def test_observers_see_every_access() -> None:
    seen: list[tuple[str, int, int]] = []
    observe = lambda kind, addresses, size, program: seen.append((kind, addresses.size, size))  # noqa: E731
    triton_memory.observers.append(observe)
    try:
        copy_kernel[(1,)](torch.zeros(6).half(), torch.zeros(8).half(), 0, 6, MASKED=True, N=8)
    finally:
        triton_memory.observers.remove(observe)
    assert seen == [("load", 6, 2), ("store", 8, 2)]


def test_launch_does_not_touch_pages_that_the_kernel_does_not() -> None:
    huge = torch.empty(1 << 33, dtype=torch.uint8)  # 8 GiB of address space
    store_kernel[(1,)](huge[1 << 32 :], 0, 8, N=8)
    assert huge[(1 << 32) + 7] == 1


@triton.jit
def read(pointer):
    return tl.load(pointer)


@triton.jit
def caller_kernel(x):
    tl.store(x, read(x + 100))


def test_fault_in_a_device_function_names_kernel_and_line() -> None:
    with pytest.raises(MemoryFault, match=r"caller_kernel: .* element 100 of 4.*return tl\.load\(pointer\)"):
        caller_kernel[(1,)](torch.zeros(4))


@triton.jit
def descriptor_kernel(x, y, rows, columns, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [M, N])
    target = tl.make_tensor_descriptor(y, [rows, columns], [columns, 1], [M, N])
    target.store([0, 0], source.load([0, 8]))


def test_tensor_descriptor_masks_its_shape_and_is_checked() -> None:
    x, y = torch.arange(64.0).reshape(4, 16), torch.zeros(4, 16)
    descriptor_kernel[(1,)](x, y, 4, 16, M=8, N=8)
    assert torch.equal(y[:, :8], x[:, 8:])
    with pytest.raises(MemoryFault, match="load of 4 bytes, buffer 'x' at element 72 of 64"):
        descriptor_kernel[(1,)](x, y, 5, 16, M=8, N=8)


@triton.jit
def tuple_kernel(pair, y):
    tl.store(y, tl.load(pair[0]) + tl.load(pair[1]))


def test_arrays_in_a_tuple_are_live() -> None:
    y = torch.zeros(1)
    tuple_kernel[(1,)]((torch.ones(1), torch.full((1,), 2.0)), y)
    assert y.item() == 3.0


def test_grid_too_large_for_a_gpu_is_an_error_and_an_empty_one_runs_nothing() -> None:
    with pytest.raises(ValueError, match="grid must be at most"):
        store_kernel[(1, 65536)](torch.zeros(8), 0, 8, N=8)
    store_kernel[(0,)](torch.zeros(8), 100, 200, N=8)
