"""What the formats' device functions share: how a tile of a weight is asked for, and how its bits are taken apart.

A device function decodes a tile and knows nothing of the kernel around it:

    decode(packed, strides, at, HOW) -> float32 [HOW.rows, HOW.columns]

packed and strides: the arrays and their strides in elements, two per array and more where it has more dimensions, in
the order of the registration; the first array's row stride is divided by HOW.align. `at` is (tile_row, tile_column,
rows, columns): it decodes rows tile_row * HOW.rows ... and columns tile_column * HOW.columns ... of a weight of
rows x columns as it is stored: [n, k], or [k, n] for a transposed format. What lies outside is not loaded, and its
value does not matter.

It loads every packed element with extent 1 along the axes that share it, broadcasts while it takes the bits apart, and
reshapes in the end: a word is loaded once, however many weights it holds, and unpacking moves nothing between threads.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class How:
    """What is known of a tile when the kernel is compiled.

    rows, columns: of the tile. even: the tiles fill the weight exactly, so that nothing is masked. unit: a power of two
    that divides the weight's columns and the tile's. align: one that divides the first array's row stride, and its
    address if that row is dense; 1 else: the compiler itself sees only whether 16 does. form: the format's form.
    group: columns (rows of a transposed weight) that share a scale, 0 for all of them. span: a power of two that
    divides the group and the tile. bits: of a packed integer. to_odd: see `dequant_integer_triton.pack_quantized`.
    """

    rows: int
    columns: int
    even: bool = False
    unit: int = 1
    align: int = 1
    form: str = ""
    group: int = 0
    span: int = 1
    bits: int = 0
    to_odd: bool = False


@triton.jit
def rows_of(at, HOW: tl.constexpr, PER: tl.constexpr):
    """int32 [rows / PER, 1]: the tile's units of PER rows; and which of them there are."""
    unit = (at[0] * (HOW.rows // PER) + tl.arange(0, HOW.rows // PER))[:, None]
    return unit, unit * PER < at[2]


@triton.jit
def columns_of(at, HOW: tl.constexpr, PER: tl.constexpr):
    """int32 (int64 in a very long row) [1, columns / PER]: the tile's units of PER columns; and which there are."""
    unit = (at[1] * (HOW.columns // PER) + tl.arange(0, HOW.columns // PER))[None, :]
    if HOW.unit > PER:  # as many units are there or not together, so that their loads may be joined
        live = unit // (HOW.unit // PER) * HOW.unit < at[3]
    else:
        live = unit * PER < at[3]
    return unit, live


@triton.jit
def first_row(array, row, strides, HOW: tl.constexpr):
    """Pointers to the first element of rows of the first array."""
    return array + row.to(tl.int64) * (strides[0] * HOW.align)


@triton.jit
def load(pointer, live, HOW: tl.constexpr):
    """The elements where `live`, all of them where the tiles fill the weight; zeros elsewhere."""
    if HOW.even:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=live, other=0)


@triton.jit
def bits_at(pointer, step, live, HOW: tl.constexpr):
    """int32: 16 bits, low byte first, at an even byte of a row of uint8 whose bytes are `step` apart.

    One load where every row begins at an even address.
    """
    if HOW.align >= 2:
        return load(pointer.to(tl.pointer_type(tl.uint16), bitcast=True), live, HOW).to(tl.int32)
    else:
        low, high = load(pointer, live, HOW).to(tl.int32), load(pointer + step, live, HOW).to(tl.int32)
        return low | (high << 8)


@triton.jit
def half_at(pointer, step, live, HOW: tl.constexpr):
    """float32: the float16 in those 16 bits."""
    return bits_at(pointer, step, live, HOW).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1(code):
    """float32 of 4-bit codes in int32: a sign, 2 bits of exponent, 1 of mantissa.

    Read as a float32 with these bits at the border of its exponent and mantissa, the number is 2^-126 times itself,
    subnormal ones included; the product is exact.
    """
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e4m3(byte):
    """float32 of float8 e4m3fn in uint8, as for `e2m1`; by hand, since sm_80 has no such conversion."""
    code = byte.to(tl.int32)
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def e5m2(byte):
    """float32 of float8 e5m2 in uint8: the upper half of a float16."""
    return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e8m0(byte):
    """float32 of powers of two in uint8: 2^(byte - 127), the lowest of them subnormal; 255 is NaN."""
    code = byte.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
