# ruff: noqa: N803  # a kernel's constexpr parameters are capitals, as everywhere in Triton
"""Triton on a CPU computes what a GPU computes."""

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagebench.kernels.triton_interpreter import activate

INTERPRETED = activate()

import torch  # noqa: E402  # triton must not be imported before activate(), and torch may import it
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

from pagebench.kernels import triton_numerics  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: a GPU is present")


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def unary_kernel(x, y, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    if OP == "neg":
        r = -a
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "relu":
        r = tl.where(a > 0.0, a, 0.0)
    elif OP == "cumsum":
        r = tl.cumsum(a, 0)
    else:
        r = tl.load(x + i) * 1.5 + 1.0
    tl.store(y + i, r)


@triton.jit
def binary_kernel(x, y, z, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "min":
        r = tl.minimum(a, b)
    elif OP == "max":
        r = tl.maximum(a, b)
    elif OP == "max_nan":
        r = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "fma":
        r = tl.fma(a, b, a)
    elif OP == "clamp":
        r = tl.clamp(a, -1.0, 1.0)
    elif OP == "lt":
        r = a < b
    elif OP == "ge":
        r = a >= b
    elif OP == "eq":
        r = a == b
    elif OP == "ne":
        r = a != b
    elif OP == "and":
        r = a > 0 and b > 0
    elif OP == "or":
        r = a > 0 or b > 0
    else:
        r = not a > 0
    tl.store(z + i, r)


def bits(array: Any) -> np.ndarray:
    """Bit patterns, every NaN as one."""
    array = array.float().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, dtype=np.float32)
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


def every_code(dtype: torch.dtype) -> torch.Tensor:
    count, ints = (65536, np.uint16) if dtype.itemsize == 2 else (256, np.uint8)
    return torch.from_numpy(np.arange(count, dtype=ints)).view(dtype)


def hard_floats(n: int = 1 << 14) -> torch.Tensor:
    """Random float32 bit patterns, and every bfloat16 and float8 boundary with the values around it."""
    random = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32)
    ties = (np.arange(0, 2**16, 32, dtype=np.uint32) << 16) | np.uint32(0x8000)
    small = np.float32(2.0) ** np.arange(-30, 20, 1 / 16, dtype=np.float32)
    values = np.concatenate([random, ties, ties - 1, ties + 1, small.view(np.uint32), (-small).view(np.uint32)])
    return torch.from_numpy(np.resize(values, 1 << 15).view(np.float32))


def run_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, y, N=x.numel())
    return y


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("source", [torch.bfloat16, *FLOAT8], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_code_decodes(source: torch.dtype, target: torch.dtype) -> None:
    codes = every_code(source)
    np.testing.assert_array_equal(bits(run_cast(codes, target)), bits(codes.float().to(target)))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_float32_rounds_to_nearest_even(target: torch.dtype) -> None:
    np.testing.assert_array_equal(bits(run_cast(hard_floats(), target)), bits(hard_floats().to(target)))


@pytest.mark.parametrize("target", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float8_rounds_to_nearest_even_and_saturates(source: torch.dtype, target: torch.dtype) -> None:
    x = hard_floats().to(source)
    limit = torch.finfo(target).max
    np.testing.assert_array_equal(bits(run_cast(x, target)), bits(x.float().clamp(-limit, limit).to(target)))


@pytest.mark.parametrize("source", [torch.int32, torch.int64, torch.int8, torch.uint8, torch.float64], ids=str)
def test_numbers_round_once_to_bfloat16(source: torch.dtype) -> None:
    x = torch.tensor([0, 1, -1, 3, 257, 259, 0x01010001, 0x01030001, 16777217 * 256 + 1]).to(source)
    x = torch.cat([x, torch.zeros(16 - len(x), dtype=source)])
    exact = x.to(torch.float64).numpy().astype(ml_dtypes.bfloat16) if source != torch.float64 else None
    got = run_cast(x, torch.bfloat16).float().numpy()
    below = np.abs(got.astype(np.float64) - x.to(torch.float64).numpy())
    assert (below <= np.maximum(np.abs(x.to(torch.float64).numpy()) * 2.0**-8, 0)).all()
    assert exact is None or (got == exact.astype(np.float32)).mean() > 0.8  # ml_dtypes rounds twice


SATURATED = {
    torch.int8: [0, 1, -1, 44, -1, 0, -1, 0],  # the low byte of a 16-bit result
    torch.uint8: [0, 1, 0, 44, 64, 0, 255, 0],
    torch.int16: [0, 1, -1, 300, 32767, -32768, 32767, -32768],
    torch.int32: [0, 1, -1, 300, 40000, -(2**31), 2**31 - 1, -(2**31)],
    torch.int64: [0, 1, -1, 300, 40000, -3000000000, 2**63 - 1, -(2**63)],
}


@pytest.mark.parametrize("target", SATURATED, ids=str)
def test_float_to_integer_truncates_and_saturates(target: torch.dtype) -> None:
    x = torch.tensor([float("nan"), 1.9, -1.9, 300.5, 40000.5, -3e9, float("inf"), -float("inf")])
    assert run_cast(x, target).tolist() == SATURATED[target]


OPERATIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "min": torch.fmin,
    "max": torch.fmax,
    "max_nan": torch.maximum,
    "lt": torch.lt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": lambda a, b: (a > 0) & (b > 0),
    "or": lambda a, b: (a > 0) | (b > 0),
    "not": lambda a, b: ~(a > 0),
    "div": lambda a, b: (a.float() / b.float()).to(a.dtype),
    "fma": lambda a, b: (a.double() * b.double() + a.double()).to(a.dtype),
    "clamp": lambda a, b: torch.fmin(torch.fmax(a, torch.tensor(-1.0)), torch.tensor(1.0)).to(a.dtype),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_operation_on_values_not_codes(op: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    a, b = (torch.from_numpy(rng.standard_normal(1024).astype(np.float32)).to(dtype) for _ in range(2))
    special = torch.tensor([0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan")]).to(dtype)
    a[:36], b[:36] = special.repeat(6), special.repeat_interleave(6)
    z = torch.empty(1024, dtype=torch.bool if OPERATIONS[op](a, b).dtype == torch.bool else dtype)
    binary_kernel[(1,)](a, b, z, op, N=1024)
    expected, got = bits(OPERATIONS[op](a, b)), bits(z)
    if op == "div" and dtype == torch.float32:
        got = np.where(np.abs(got.astype(np.int64) - expected) <= 2, expected, got)  # div.full, within two units
    zero_signs_may_differ = op in ("min", "max", "max_nan", "clamp")
    both_zero = ((expected | got) & 0x7FFFFFFF) == 0
    assert ((expected == got) | (zero_signs_may_differ & both_zero)).all()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("neg", lambda a: -a),
        ("abs", abs),
        ("relu", lambda a: torch.where(a > 0, a, 0.0)),
        ("scaled", lambda a: a * 1.5 + 1.0),
    ],
)
def test_unary_operation_on_every_bfloat16(op: str, expected: Any) -> None:
    a = every_code(torch.bfloat16)
    y = torch.empty_like(a)
    unary_kernel[(1,)](a, y, op, N=65536)
    np.testing.assert_array_equal(bits(y), bits(expected(a)))


def test_running_sum_of_bfloat16_rounds_every_step() -> None:
    a = torch.full((512,), 1.0, dtype=torch.bfloat16)
    y = torch.empty_like(a)
    unary_kernel[(1,)](a, y, "cumsum", N=512)
    assert y.float().tolist() == [min(n, 256) for n in range(1, 513)]


@triton.jit
def reduce_kernel(x, y, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        r = tl.sum(a, 1)
    elif OP == "max":
        r = tl.max(a, 1)
    elif OP == "min":
        r = tl.min(a, 1)
    elif OP == "argmax":
        r = tl.argmax(a, 1)
    elif OP == "argmin":
        r = tl.argmin(a, 1)
    else:
        r = tl.xor_sum(a, 1)
    tl.store(y + tl.arange(0, M), r)


REDUCTIONS = {
    "sum": lambda a: a.double().sum(1),
    "max": lambda a: a.float().nan_to_num(-float("inf"), float("inf"), -float("inf")).max(1).values,
    "min": lambda a: a.float().nan_to_num(float("inf"), float("inf"), -float("inf")).min(1).values,
    "argmax": lambda a: a.float().nan_to_num(-float("inf"), float("inf"), -float("inf")).argmax(1),
    "argmin": lambda a: a.float().nan_to_num(float("inf"), float("inf"), -float("inf")).argmin(1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduction_on_values_not_codes(op: str, dtype: torch.dtype) -> None:
    a = torch.from_numpy(np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)).to(dtype)
    if op != "sum":
        a[:, 3] = float("nan")
    y = torch.empty(8, dtype=torch.float32)
    reduce_kernel[(1,)](a, y, op, M=8, N=64)
    torch.testing.assert_close(y.double(), REDUCTIONS[op](a).double(), rtol=0, atol=0.3 if op == "sum" else 0)


def test_max_of_nothing_but_nan_is_nan_without_a_warning() -> None:
    y = torch.empty(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_kernel[(1,)](torch.full((2, 4), float("nan")), y, "max", M=2, N=4)
    assert y.isnan().all()


def test_half_sum_overflows_as_it_does_in_half_registers() -> None:
    y = torch.empty(1)
    reduce_kernel[(1,)](torch.tensor([[60000.0, 60000.0, -60000.0, -60000.0]]).half(), y, "sum", M=1, N=4)
    assert not y.isfinite().all() or y.item() == 0.0
    reduce_kernel[(1,)](torch.full((1, 4), 60000.0).half(), y, "sum", M=1, N=4)
    assert y.item() == float("inf")


def test_reduction_with_its_own_combine_function() -> None:
    a = torch.randint(0, 1 << 30, (4, 32), dtype=torch.int32)
    y = torch.empty(4, dtype=torch.int32)
    reduce_kernel[(1,)](a, y, "xor", M=4, N=32)
    assert y.tolist() == np.bitwise_xor.reduce(a.numpy(), axis=1).tolist()


@triton.jit
def dot_kernel(x, y, z, PRECISION: tl.constexpr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + n[:, None] * K + k[None, :])
    tl.store(z + m[:, None] * N + n[None, :], tl.dot(a, tl.trans(b), input_precision=PRECISION))


def run_dot(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
    """a [m, k] times b [n, k] transposed, float32."""
    z = torch.empty(a.shape[0], b.shape[0])
    dot_kernel[(1,)](a, b, z, precision, M=a.shape[0], K=a.shape[1], N=b.shape[0])
    return z


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *FLOAT8], ids=str)
def test_dot_multiplies_values_and_sums_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(16, 64, generator=generator).to(dtype) for _ in range(2))
    torch.testing.assert_close(run_dot(a, b).double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)


def test_half_dot_does_not_overflow_at_65504() -> None:
    assert run_dot(torch.full((16, 16), 256.0).half(), torch.full((16, 16), 256.0).half()).eq(2.0**20).all()


def test_float32_dot_is_tf32_unless_ieee() -> None:
    a, one = torch.full((16, 16), 1.0 + 2.0**-12), torch.eye(16)
    assert run_dot(a, one, "tf32").eq(1.0).all()
    assert run_dot(a, one, "ieee").eq(1.0 + 2.0**-12).all()


@triton.jit
def add_bfloat16_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(x + i // 4, tl.load(y + i))


def test_atomic_add_on_bfloat16_adds_values() -> None:
    x, y = torch.tensor([1.5, -2.0]).bfloat16(), torch.arange(8).bfloat16()
    add_bfloat16_kernel[(1,)](x, y, N=8)
    assert x.tolist() == [7.5, 20.0]


@triton.jit
def float_argument_kernel(x, y, scale, big, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * scale)
    tl.store(y + N + i, (big * big) / 4.0e19)


def test_float_argument_is_float32_and_wide_integer_is_int64() -> None:
    y = torch.empty(4)
    float_argument_kernel[(1,)](torch.full((2,), 60000.0).half(), y, 3.0, 3000000000, N=2)
    assert y[:2].tolist() == [180000.0, 180000.0]
    assert y[2].item() == pytest.approx(9e18 / 4e19)


@triton.jit
def integer_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, a >> 4)
    tl.store(y + N + i, (a & 0xF) - 8)
    tl.store(y + 2 * N + i, a.to(tl.int64) * 3 // 2)
    tl.store(y + 3 * N + i, a.to(tl.uint8, bitcast=True).to(tl.int32) if a.dtype == tl.int8 else a % 5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32], ids=str)
def test_integer_arithmetic_is_that_of_c(dtype: torch.dtype) -> None:
    x = torch.tensor([-128, -7, -1, 0, 1, 7, 8, 127], dtype=dtype)
    y = torch.empty(4, 8, dtype=torch.int64)
    integer_kernel[(1,)](x, y, N=8)
    v = x.tolist()
    assert y[0].tolist() == [a >> 4 for a in v]
    assert y[1].tolist() == [(a & 15) - 8 for a in v]
    assert y[2].tolist() == [int(a * 3 / 2) for a in v]
    assert y[3].tolist() == [a & 255 for a in v] if dtype == torch.int8 else [int(np.fmod(a, 5)) for a in v]


@triton.jit
def loop_kernel(y, n, step, stride):
    total = 0
    wrapped = 0
    for i in range(0, n, step):
        total += i
        wrapped = i * stride
    while total > 10:
        total -= 10
    tl.store(y, total)
    tl.store(y + 1, wrapped)
    for j in tl.static_range(2):
        tl.store(y + 2 + j, tl.num_programs(0) * tl.cdiv(n, 4) + j)


def test_loops_have_runtime_bounds_and_int32_variables() -> None:
    y = torch.zeros(4, dtype=torch.int64)
    loop_kernel[(2,)](y, 10, 3, 1 << 30)
    assert y.tolist() == [8, np.int32(9 << 30 & 0xFFFFFFFF if 9 << 30 & 0x80000000 == 0 else 0), 6, 7]


@triton.jit
def ambiguous_kernel(x, N: tl.constexpr):
    if tl.load(x + tl.arange(0, N)) > 0:
        tl.store(x, 1)


def test_condition_on_a_block_is_an_error() -> None:
    with pytest.raises(Exception, match="condition must be a scalar"):
        ambiguous_kernel[(1,)](torch.ones(4), N=4)


@triton.jit
def unpack_kernel(x, y, z, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    both = tl.join(a & 15, a >> 4)
    tl.store(y + tl.arange(0, 2 * N), tl.reshape(both, (2 * N,)))
    tl.store(z + tl.arange(0, 2 * N), tl.interleave(a & 15, a >> 4))


def test_nibbles_unpack_with_join_reshape_and_interleave() -> None:
    x = torch.arange(0, 256, 16, dtype=torch.uint8) + 5
    y, z = torch.empty(32, dtype=torch.uint8), torch.empty(32, dtype=torch.uint8)
    unpack_kernel[(1,)](x, y, z, N=16)
    assert y.tolist() == z.tolist() == [n for a in x.tolist() for n in (a & 15, a >> 4)]


@triton.jit
def half_bits_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    low, high = tl.load(x + 2 * i).to(tl.uint16), tl.load(x + 2 * i + 1).to(tl.uint16)
    tl.store(y + i, (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32))


def test_half_from_two_bytes_is_exact() -> None:
    codes = every_code(torch.float16)
    y = torch.empty(65536)
    half_bits_kernel[(1,)](codes.view(torch.uint8), y, N=65536)
    np.testing.assert_array_equal(bits(y), bits(codes))


def test_toward_zero_rounding_of_float16_and_bfloat16() -> None:
    values = np.array([1.0009, -1.0009, 65519.0, 1e6, np.inf, 2.0**-24 * 1.9], dtype=np.float32)
    codes = triton_numerics.encode(values, "fp16", toward_zero=True)
    expected = np.array([1.0, -1.0, 65504.0, 65504.0, np.inf, 2.0**-24], dtype=np.float16)
    np.testing.assert_array_equal(codes.view(np.float16), expected)


@triton.jit
def math_kernel(x, y, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    if OP == "exp":
        r = tl.exp(a)
    elif OP == "exp2":
        r = tl.exp2(a)
    elif OP == "log":
        r = tl.log(a)
    elif OP == "log2":
        r = tl.log2(a)
    elif OP == "sqrt":
        r = tl.sqrt(a)
    elif OP == "rsqrt":
        r = tl.rsqrt(a)
    elif OP == "div":
        r = 1.0 / a
    else:
        r = tl.div_rn(1.0, a)
    tl.store(y + i, r)


def run_math(op: str, *values: float) -> list[float]:
    x = torch.tensor(values)
    y = torch.empty_like(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        math_kernel[(1,)](x, y, op, N=len(values))
    return y.tolist()


INF, TINY = float("inf"), 2.0**-130  # TINY is subnormal


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("exp", (0.0, -INF, INF, -1000.0), [1.0, 0.0, INF, 0.0]),
        ("exp2", (-126.0, -127.0, -INF, 128.0), [2.0**-126, 0.0, 0.0, INF]),
        ("log", (1.0, 0.0, INF, -0.0), [0.0, -INF, INF, -INF]),
        ("log2", (8.0, 0.0, INF, TINY), [3.0, -INF, INF, -130.0]),
        ("sqrt", (4.0, 0.0, INF, TINY), [2.0, 0.0, INF, 0.0]),
        ("rsqrt", (4.0, 0.0, INF, TINY), [0.5, INF, 0.0, INF]),
        ("div", (4.0, 0.0, INF, -0.0), [0.25, INF, 0.0, -INF]),
    ],
)
def test_function_at_its_limits_as_the_hardware_has_it(op: str, values: tuple[float], expected: list[float]) -> None:
    assert run_math(op, *values) == expected


def test_division_is_approximate_and_div_rn_is_not() -> None:
    x = torch.arange(1.0, 1025.0)
    three, quotient = torch.full((1024,), 3.0), torch.empty(1024)
    binary_kernel[(1,)](three, x, quotient, "div", N=1024)
    assert 0 < (quotient != torch.div(three, x)).sum() < 512
    assert run_math("div_rn", *x.tolist()) == (1.0 / x).tolist()


@triton.jit
def libdevice_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, libdevice.tanh(a))
    tl.store(y + N + i, libdevice.float2int_rn(a))
    tl.store(y + 2 * N + i, libdevice.pow(a, 2.0))


def test_libdevice_functions_run() -> None:
    x, y = torch.tensor([-INF, -0.5, 2.5, 3.5]), torch.empty(3, 4)
    libdevice_kernel[(1,)](x, y, N=4)
    torch.testing.assert_close(y[0], torch.tanh(x))
    assert y[1].tolist() == [-(2.0**31), 0.0, 2.0, 4.0]
    assert y[2].tolist() == [INF, 0.25, 6.25, 12.25]


@triton.jit
def both(a, b):
    return a * b, a + b


@triton.jit
def control_kernel(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    if 0 <= n < 100:
        product, total = both(tl.load(x + i), 2.0)
        tl.store(y + i, max(product, total), mask=0 <= i < n)
    tl.store(y + N, min(n, 3))
    tl.store(y + N + 1, 5 if n > 3 else 6)


def test_chained_comparison_extremes_and_device_functions() -> None:
    x, y = torch.arange(-4.0, 4.0), torch.zeros(10)
    control_kernel[(1,)](x, y, 7, N=8)
    assert y.tolist() == [*torch.maximum(x * 2, x + 2)[:7].tolist(), 0.0, 3.0, 5.0]


@triton.jit
def compose(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def recurrence_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    product, last = tl.reduce((a, a), 0, compose)
    tl.store(y, product)
    tl.store(y + 1, last)
    tl.store(y + 2 + i, tl.associative_scan((a, a), 0, compose)[1])


def test_reduction_keeps_the_order_of_its_operands() -> None:
    x = torch.tensor([2, 3, 5, 7])
    y = torch.empty(6, dtype=torch.int64)
    recurrence_kernel[(1,)](x, y, N=4)
    assert y.tolist() == [210, 357, 2, 9, 50, 357]


@triton.jit
def sort_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.sort(tl.load(x + i)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_sort_orders_values_not_codes(dtype: torch.dtype) -> None:
    x = (torch.randn(32, generator=torch.Generator().manual_seed(4)) * 100).to(dtype)
    y = torch.empty_like(x)
    sort_kernel[(1,)](x, y, N=32)
    assert torch.equal(y, x.sort().values)
