"""Device functions of INT8, GPTQ, AWQ and compressed-tensors' packed integers: see `dequant_tile_triton` for what a
device function is, and `reference/dequant_integer.py` for the formats. All are scale * (q - zero): the difference is
exact, and so is the product where the scale has 16 bits.
"""

import triton
import triton.language as tl

from pagebench.kernels.dequant_tile_triton import columns_of, first_row, load, rows_of


@triton.jit
def int8(packed, strides, at, HOW: tl.constexpr):
    """scale * (weight - zero_point). [rows, spans, columns of a span], a span being columns that share a scale."""
    row, row_live = rows_of(at, HOW, 1)
    column, live = columns_of(at, HOW, 1)
    pointer = first_row(packed[0], row, strides, HOW) + column.to(tl.int64) * strides[1]
    q = load(pointer, row_live & live, HOW).to(tl.int32)
    q = tl.reshape(q, [HOW.rows, HOW.columns // HOW.span, HOW.span])
    group, live = _groups(at, HOW)
    scale, zero = packed[1], packed[len(packed) - 1]
    if HOW.form.startswith("group"):
        scale += row.to(tl.int64) * strides[2] + group * strides[3]
        zero += row.to(tl.int64) * strides[len(packed) * 2 - 2] + group * strides[len(packed) * 2 - 1]
        live = row_live & live
    elif HOW.form.startswith("channel"):
        scale += row.to(tl.int64) * strides[3]
        zero += row.to(tl.int64) * strides[len(packed) * 2 - 1]
        live = row_live
    else:
        scale += tl.zeros([1, 1], tl.int64)
        zero += tl.zeros([1, 1], tl.int64)
        live = tl.full([1, 1], True, tl.int1)
    if HOW.form.endswith("zero"):
        q -= load(zero, live, HOW).to(tl.int32)[:, :, None]
    return tl.reshape(q.to(tl.float32) * load(scale, live, HOW)[:, :, None], [HOW.rows, HOW.columns])


@triton.jit
def gptq_v1(packed, strides, at, HOW: tl.constexpr):
    """As gptq_v2, the zero points stored less one."""
    return _gptq(packed, strides, at, 1, HOW)


@triton.jit
def gptq_v2(packed, strides, at, HOW: tl.constexpr):
    """scales[g, n] * (q - zero): rows are k, 8 to a word; columns n, 8 zero points to a word."""
    return _gptq(packed, strides, at, 0, HOW)


@triton.jit
def gptq_words(packed, strides, at, HOW: tl.constexpr, wanted=None):
    """int32 [words, columns], each of eight codes. wanted: whether they are loaded at all; zeros if not."""
    word_row, word_live = rows_of(at, HOW, 8)
    column, live = columns_of(at, HOW, 1)
    pointer = first_row(packed[0], word_row, strides, HOW) + column.to(tl.int64) * strides[1]
    if wanted is None:
        return load(pointer, word_live & live, HOW)
    else:
        return tl.load(pointer, mask=wanted & word_live & live, other=0)


@triton.jit
def _gptq_fields(packed, strides, at, HOW: tl.constexpr):
    """The codes int32 [words, 8, columns], their rows k [words, 8], and which words are there [words, 1]."""
    word = gptq_words(packed, strides, at, HOW)
    word_row, word_live = rows_of(at, HOW, 8)
    q = (word[:, None, :] >> (tl.arange(0, 8) * 4)[None, :, None]) & 15
    k = word_row * 8 + tl.arange(0, 8)[None, :]
    return q, k, word_live


@triton.jit
def _gptq(packed, strides, at, ADDED: tl.constexpr, HOW: tl.constexpr):
    """[words, k of a word, n]. Most often the rows of a tile are of one group: then its scales are loaded once."""
    q, k, word_live = _gptq_fields(packed, strides, at, HOW)
    group = load(packed[3] + k.to(tl.int64) * strides[7], word_live, HOW).to(tl.int64)
    first, last = tl.min(group), tl.max(group)
    if first == last:
        value = _of_groups(q, packed, strides, tl.zeros([1, 1], tl.int64) + first, at, ADDED, HOW)
    else:
        value = _of_groups(q, packed, strides, group, at, ADDED, HOW)
    return tl.reshape(value, [HOW.rows, HOW.columns])


@triton.jit
def _of_groups(q, packed, strides, group, at, ADDED: tl.constexpr, HOW: tl.constexpr):
    """float32 like q [words, 8, columns]: scale * (q - zero) of the group (int64) of each row, [words, 8] or [1, 1]."""
    WORDS: tl.constexpr = group.shape[0]
    PER: tl.constexpr = group.shape[1]
    scale, zero = gptq_scales(tl.reshape(group, [WORDS * PER, 1]), packed, strides, at, ADDED, HOW)
    zero, scale = tl.reshape(zero, [WORDS, PER, HOW.columns]), tl.reshape(scale, [WORDS, PER, HOW.columns])
    return (q - zero).to(tl.float32) * scale


@triton.jit
def gptq_scales(group, packed, strides, at, ADDED: tl.constexpr, HOW: tl.constexpr):
    """Scales, float32, and zero points, int32, both [groups, columns], of groups, int64 [groups, 1]."""
    word_column, live = columns_of(at, HOW, 8)
    word = load(packed[1] + group * strides[2] + word_column.to(tl.int64) * strides[3], live, HOW)
    zero = ((word[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) + ADDED) & 15
    column, live = columns_of(at, HOW, 1)
    scale = load(packed[2] + group * strides[4] + column.to(tl.int64) * strides[5], live, HOW)
    return scale.to(tl.float32), tl.reshape(zero, [group.shape[0], HOW.columns])


@triton.jit
def awq(packed, strides, at, HOW: tl.constexpr):
    """scales[g, n] * (q - zero): rows are k, SPAN of them in one group; columns n, 8 to a word, even ones lowest."""
    SPAN: tl.constexpr = HOW.span
    row, row_live = rows_of(at, HOW, 1)
    word_column, word_live = columns_of(at, HOW, 8)
    span, span_live = rows_of(at, HOW, SPAN)
    group = (span * SPAN // HOW.group if HOW.group > 0 else span * 0).to(tl.int64)
    pointer = first_row(packed[0], row, strides, HOW) + word_column.to(tl.int64) * strides[1]
    q = _interleaved(load(pointer, row_live & word_live, HOW), HOW)
    zero = load(packed[1] + group * strides[2] + word_column.to(tl.int64) * strides[3], span_live & word_live, HOW)
    zero = _interleaved(zero, HOW)
    column, live = columns_of(at, HOW, 1)
    scale = load(packed[2] + group * strides[4] + column.to(tl.int64) * strides[5], span_live & live, HOW).to(
        tl.float32
    )
    q = tl.reshape(q, [HOW.rows // SPAN, SPAN, HOW.columns])
    return tl.reshape((q - zero[:, None, :]).to(tl.float32) * scale[:, None, :], [HOW.rows, HOW.columns])


@triton.jit
def gptq_v1_onward(packed, strides, at, known, scale, zero, HOW: tl.constexpr):
    """As gptq_v2_onward, the zero points stored less one."""
    return _gptq_onward(packed, strides, at, known, scale, zero, 1, HOW)


@triton.jit
def gptq_v2_onward(packed, strides, at, known, scale, zero, HOW: tl.constexpr):
    """gptq_v2 of tiles one below the other: float32 [rows, columns], and group `known`'s scale and zero to go on with.

    scale, zero: float32 [1, columns], the zero point raised by 2^23, so that a field that is set into the last bits of
    2^23 needs no conversion. They are loaded when the group changes; where a tile's rows have several, each row's own.
    """
    return _gptq_onward(packed, strides, at, known, scale, zero, 0, HOW)


@triton.jit
def _gptq_onward(packed, strides, at, known, scale, zero, ADDED: tl.constexpr, HOW: tl.constexpr):
    q, k, word_live = _gptq_fields(packed, strides, at, HOW)
    group = load(packed[3] + k.to(tl.int64) * strides[7], word_live, HOW)
    if not HOW.even:  # rows that are not there are of any group
        group = tl.where(word_live, group, tl.max(group))
    first, last = tl.min(group), tl.max(group)
    column, live = columns_of(at, HOW, 1)
    if first == last:
        if first != known:
            known = first
            wide = first.to(tl.int64)
            field = load(packed[1] + wide * strides[2] + (column >> 3).to(tl.int64) * strides[3], live, HOW)
            zero = _raised(((field >> ((column & 7) * 4)) + ADDED) & 15)
            scale = load(packed[2] + wide * strides[4] + column.to(tl.int64) * strides[5], live, HOW).to(tl.float32)
        value = (_raised(q) - zero[:, None, :]) * scale[:, None, :]
    else:
        value = _of_groups(q, packed, strides, group.to(tl.int64), at, ADDED, HOW)
    return tl.reshape(value, [HOW.rows, HOW.columns]), known, scale, zero


@triton.jit
def awq_onward(packed, strides, at, known, scale, zero, HOW: tl.constexpr):
    """As gptq_v2_onward, for tiles whose rows are of one group."""
    row, row_live = rows_of(at, HOW, 1)
    word_column, word_live = columns_of(at, HOW, 8)
    pointer = first_row(packed[0], row, strides, HOW) + word_column.to(tl.int64) * strides[1]
    q = _interleaved(load(pointer, row_live & word_live, HOW), HOW)
    group = at[0] * HOW.rows // HOW.group if HOW.group > 0 else at[0] * 0
    if group != known:
        known = group
        wide = group.to(tl.int64)
        word = load(packed[1] + wide * strides[2] + word_column.to(tl.int64) * strides[3], word_live, HOW)
        zero = _raised(_interleaved(word, HOW))
        column, live = columns_of(at, HOW, 1)
        scale = load(packed[2] + wide * strides[4] + column.to(tl.int64) * strides[5], live, HOW).to(tl.float32)
    return (_raised(q) - zero) * scale, known, scale, zero


@triton.jit
def _raised(q):
    """float32: 2^23 + q, for small integers in int32."""
    return (q | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _interleaved(word, HOW: tl.constexpr):
    """int32 [rows, columns]: 4-bit fields of the words, those of columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest on."""
    column = tl.arange(0, 8)
    shift = (column >> 1) * 4 + (column & 1) * 16
    return tl.reshape((word[:, :, None] >> shift[None, None, :]) & 15, [word.shape[0], HOW.columns])


@triton.jit
def pack_quantized(packed, strides, at, HOW: tl.constexpr):
    """scale * (q - zero). HOW.to_odd: the scale is float32, and the exact product is to be rounded once to 16 bits."""
    row, row_live = rows_of(at, HOW, 1)
    words = first_row(packed[0], row, strides, HOW)
    if 32 % HOW.bits == 0:  # a word holds PER whole fields
        PER: tl.constexpr = 32 // HOW.bits
        word_column, live = columns_of(at, HOW, PER)
        word = load(words + word_column.to(tl.int64) * strides[1], row_live & live, HOW)
        q = (word[:, :, None] >> (tl.arange(0, PER) * HOW.bits)[None, None, :]) & ((1 << HOW.bits) - 1)
    else:
        column, live = columns_of(at, HOW, 1)
        q = _field(words, strides[1], column, row_live & live, HOW)
    q = tl.reshape(q, [HOW.rows, HOW.columns // HOW.span, HOW.span])

    group, live = _groups(at, HOW)
    live = row_live & live
    scale = load(packed[1] + row.to(tl.int64) * strides[2] + group * strides[3], live, HOW)[:, :, None]
    if HOW.form == "zero_point":
        q -= _field(packed[2] + group * strides[5], strides[4], row, live, HOW)[:, :, None]
    else:
        q -= 1 << (HOW.bits - 1)
    value = _product_to_odd(q, scale) if HOW.to_odd else q.to(tl.float32) * scale.to(tl.float32)
    return tl.reshape(value, [HOW.rows, HOW.columns])


@triton.jit
def _field(words, step, index, live, HOW: tl.constexpr):
    """int32: field `index` of HOW.bits bits in a string of int32 words `step` apart; it may straddle two of them."""
    bit = index.to(tl.int64) * HOW.bits
    word, shift = bit >> 5, (bit & 31).to(tl.int32)
    low = tl.load(words + word * step, mask=live, other=0).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    straddles = shift + HOW.bits > 32
    high = tl.load(words + (word + 1) * step, mask=live & straddles, other=0).to(tl.uint32, bitcast=True)
    high = high << ((32 - shift) & 31).to(tl.uint32)  # zero where nothing straddles
    return ((low | high) & ((1 << HOW.bits) - 1)).to(tl.int32)


@triton.jit
def _product_to_odd(q, scale):
    """float32 of the exact product, inexact ones rounded to the neighbour with an odd last bit: rounding that to 16
    bits is rounding the product itself. In float64 the product is exact.
    """
    product = q.to(tl.float64) * scale.to(tl.float64)
    nearest = product.to(tl.float32)
    back = nearest.to(tl.float64)
    bits = nearest.to(tl.int32, bitcast=True)
    truncated = bits - (tl.abs(back) > tl.abs(product)).to(tl.int32)
    return tl.where(back != product, truncated | 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def _groups(at, HOW: tl.constexpr):
    """int64 [1, spans]: the group of each span of columns; and which spans there are."""
    span, live = columns_of(at, HOW, HOW.span)
    return (span * HOW.span // HOW.group if HOW.group > 0 else span * 0).to(tl.int64), live
