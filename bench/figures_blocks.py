"""Figures of the memory itself: bytes, the formula, waste, gaps, block tables. Every number in them is computed."""

from typing import TYPE_CHECKING, Any

from bench.figures import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, SKY, WASTE_HATCH, YELLOW, drawing
from pagebench.reference.kv_blocks import KV_FORMATS, kv_bytes, naive_waste, paged_waste
from pagebench.reference.kv_blocks_contiguous import ContiguousAllocator
from pagebench.reference.kv_blocks_paged import PagedAllocator
from pagebench.reference.models import LLAMA_2_13B

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWNERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
LIGHT = (BLUE, INK)  # colours on which white text is read


def _box(axis: Any, x: float, y: float, width: float, height: float, color: str, text: str = "", **style: Any) -> None:
    """A rectangle with text in its middle."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=style.pop("edge", "white"), **style))
    if text:
        ink = "white" if color in LIGHT else INK
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=ink)


def _waste(axis: Any, x: float, y: float, width: float, height: float, text: str = "") -> None:
    _box(axis, x, y, width, height, PALE, text, edge=GREY, hatch="" if text else WASTE_HATCH, linewidth=0.5)


def bytes_per_number() -> "Figure":
    """Bytes of one cached number in each format: the number, and its share of a scale."""
    names = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
    head = LLAMA_2_13B.head_size
    with drawing(2.6) as (figure, (axis,)):
        for y, name in enumerate(reversed(names)):
            form = KV_FORMATS[name]
            total = form.row_bytes(head) / head
            axis.barh(y, form.bytes_per_element, 0.62, color=BLUE)
            scale = total - form.bytes_per_element
            axis.barh(y, scale, 0.62, left=form.bytes_per_element, color=ORANGE, hatch=WASTE_HATCH, edgecolor="white")
            axis.text(total + 0.05, y, f"{total:.6g} B", va="center")
        axis.barh(0, 0, color=BLUE, label="the number")
        axis.barh(0, 0, color=ORANGE, hatch=WASTE_HATCH, edgecolor="white", label="its share of a scale")
        axis.set_yticks(range(len(names)), reversed(names))
        axis.set_xlim(0, 4.6)
        axis.set_xlabel(f"bytes per cached number (head size {head})")
        axis.set_title("One number of the KV cache")
        axis.legend(loc="lower right")
        return figure


def formula() -> "Figure":
    """The factors of the KV formula for one sequence of Llama-2-13B, and what each multiplies up to."""
    model, seq_len = LLAMA_2_13B, 4096
    factors = (
        ("2", "K and V", 2),
        (f"{model.num_kv_heads}", "KV heads", model.num_kv_heads),
        (f"{model.head_size}", "head size", model.head_size),
        ("2 B", "FP16", 2),
        (f"{model.num_layers}", "layers", model.num_layers),
        (f"{seq_len}", "tokens", seq_len),
    )
    product = 1
    with drawing(2.5) as (figure, (axis,)):
        for i, (text, what, factor) in enumerate(factors):
            product *= factor
            x = i * 1.25
            _box(axis, x, 1, 1, 0.8, OWNERS[i], "")
            ink = "white" if OWNERS[i] in LIGHT else INK
            axis.text(x + 0.5, 1.4, text, ha="center", va="center", fontsize=12, color=ink)
            axis.text(x + 0.5, 0.8, what, ha="center", va="center")
            axis.text(x + 0.5, 0.3, _binary(product) if i >= 3 else f"{product:,}", ha="center", fontsize=8, color=INK)
            if i:
                axis.text(x - 0.125, 1.4, "×", ha="center", va="center", fontsize=12)
        total = kv_bytes(1, seq_len, model.num_layers, model.num_kv_heads, model.head_size, 2)
        assert total == product, "the figure's factors are not the formula's"
        axis.text(-0.15, 0.3, "so far", ha="right", fontsize=8)
        axis.text(3.7, -0.25, f"= {total:,} bytes of KV for one sequence", ha="center", fontsize=11)
        axis.set_xlim(-0.8, 7.4)
        axis.set_ylim(-0.35, 1.9)
        axis.axis("off")
        axis.set_title("Llama-2-13B, one sequence of 4096 tokens: the factors of its KV cache")
        return figure


def _binary(value: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value} B"


def naive_bar() -> "Figure":
    """One reservation of 2048 slots that holds 100 tokens, above the blocks that hold the same."""
    seq_len, max_len, block = 100, 2048, 16
    waste, paged = naive_waste(seq_len, max_len), paged_waste(seq_len, block)
    with drawing(2.4) as (figure, (axis,)):
        _box(axis, 0, 1, seq_len, 0.6, BLUE)
        _waste(axis, seq_len, 1, waste, 0.6)
        _box(axis, 0, 0, seq_len, 0.6, BLUE)
        _waste(axis, seq_len, 0, paged, 0.6)
        axis.text(seq_len + waste / 2, 1.3, f"{waste} slots reserved, never written ({waste / max_len:.1%})",
                  ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})  # fmt: skip
        axis.annotate(
            f"{paged} slots unused: {-(-seq_len // block)} blocks of {block} hold {seq_len} tokens",
            (seq_len + paged, 0.3), (260, 0.3), va="center", arrowprops={"arrowstyle": "-", "color": GREY},
        )  # fmt: skip
        axis.text(8, 0.8, f"{seq_len} slots written in both", va="center", fontsize=8)
        axis.set_yticks([1.3, 0.3], ["naive", "paged"])
        axis.set_ylim(-0.2, 1.8)
        axis.set_xlim(0, max_len + 8)
        axis.set_xticks(range(0, max_len + 1, 256))
        axis.set_xlabel("token slots held by one request")
        axis.set_title(f"A request of {seq_len} tokens in a reservation of {max_len}, and in blocks of {block}")
        return figure


def scattered_gaps() -> "Figure":
    """A slab after some requests have left: enough is free for the next one, but not in one piece."""
    slab, wanted = 8192, 2500
    allocator = ContiguousAllocator(slab)
    for seq_id, size in enumerate((1400, 900, 1100, 1300, 800, 1500, 1192)):
        allocator.reserve(seq_id, size, size)
    for seq_id in (1, 3, 5):
        allocator.free(seq_id)
    free, largest = allocator.free_slots, allocator.largest_extent
    assert largest < wanted <= free, "the figure shows fragmentation"
    with drawing(2.3) as (figure, (axis,)):
        for start, size, owner in allocator.layout():
            if owner is None:
                _waste(axis, start, 0, size, 0.6, f"{size}\nfree")
            else:
                _box(axis, start, 0, size, 0.6, BLUE, f"request {owner + 1}\n{size}")
        _box(axis, 0, 0.9, wanted, 0.4, ORANGE, f"next request: {wanted} slots")
        axis.text(wanted + 120, 1.1, f"{free} slots are free, the largest gap is {largest}: it must wait", va="center")
        axis.set_xlim(0, slab)
        axis.set_ylim(-0.05, 1.4)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.set_xticks(range(0, slab + 1, 1024))
        axis.set_xlabel("address in the slab (token slots)")
        axis.set_title("Contiguous reservations leave gaps (external fragmentation)")
        return figure


def block_tables() -> "Figure":
    """Two requests with one system prompt and a fork: tables, and the blocks they point to."""
    size = 4
    allocator = PagedAllocator(9, size)
    system = list(range(8))
    for owner in (10, 11, 12):  # gaps in the pool, so that the tables are seen to scatter
        allocator.create(owner, size)
    allocator.create(0, [*system, 100, 101, 102])
    allocator.free(10)
    allocator.create(1, [*system, 200, 201, 202, 203, 204])
    allocator.free(12)
    allocator.fork(1, 2)
    (pair,) = allocator.append(2, 300)
    allocator.free(11)
    names = {0: "request A", 1: "request B", 2: "fork of B"}
    references: dict[int, list[int]] = {}
    for seq_id in names:
        for block in allocator.block_table(seq_id):
            references.setdefault(block, []).append(seq_id)
    colors = {0: BLUE, 1: ORANGE, 2: PURPLE}
    lines = {0: "-", 1: "--", 2: (0, (1, 1))}  # told apart without colour, too
    with drawing(3.4) as (figure, (axis,)):
        for block in range(allocator.pool.num_blocks):
            owners = references.get(block, [])
            color = PALE if not owners else GREEN if len(owners) > 1 else colors[owners[0]]
            _box(axis, block + 0.05, 0, 0.9, 0.8, color, str(block), edge=GREY)
            state = "free" if not owners else f"{len(owners)} references" if len(owners) > 1 else "1 reference"
            axis.text(block + 0.5, -0.15, state, ha="center", va="top", fontsize=7)
        left = 0.0
        for row, (seq_id, name) in enumerate(names.items()):
            table, color = allocator.block_table(seq_id), colors[seq_id]
            axis.text(left, 3.4, f"{name}: {allocator.length(seq_id)} tokens", va="center", fontsize=8.5)
            for position, block in enumerate(table):
                x = left + position * 0.62
                _box(axis, x, 2.6, 0.56, 0.55, "white", str(block), edge=color, linewidth=1.4, linestyle=lines[seq_id])
                axis.annotate(
                    "", (block + 0.5 + (row - 1) * 0.2, 0.83), (x + 0.29, 2.58),
                    arrowprops={
                        "arrowstyle": "-|>", "color": color, "linewidth": 1.0, "linestyle": lines[seq_id],
                        "shrinkA": 0, "shrinkB": 0,
                    },
                )  # fmt: skip
            left += len(table) * 0.62 + 0.75
        axis.annotate(
            "", (pair[1] + 0.5, -0.62), (pair[0] + 0.5, -0.62), arrowprops={"arrowstyle": "-|>", "color": INK}
        )
        axis.text(
            (pair[0] + pair[1]) / 2 + 0.5, -0.75, f"copied on the fork's first write: block {pair[0]} to {pair[1]}",
            ha="center", va="top", fontsize=8,
        )  # fmt: skip
        axis.set_xlim(-0.05, allocator.pool.num_blocks + 0.05)
        axis.set_ylim(-1.0, 3.7)
        axis.axis("off")
        axis.set_title(f"Block tables (block size {size}): a system prompt of {len(system)} tokens is held once")
        return figure


def edge_cases() -> "Figure":
    """S = 1, 32 and 100 in blocks of 16: which slots are used."""
    block, lengths = 16, (1, 32, 100)
    rows = {1: 0, 32: 1, 100: 2}
    with drawing(2.7) as (figure, (axis,)):
        for length, row in rows.items():
            y, blocks = 2 - row, -(-length // block)
            for index in range(blocks):
                used = min(block, length - index * block)
                x = index * block
                _box(axis, x, y, used, 0.55, BLUE, edge="none")
                if used < block:
                    _waste(axis, x + used, y, block - used, 0.55)
                _box(axis, x, y, block, 0.55, "none", edge=INK, linewidth=0.9)
            unused = paged_waste(length, block)
            text = (
                f"{blocks} block{'s' if blocks > 1 else ''}, {unused} unused (naive 2048: {naive_waste(length, 2048)})"
            )
            axis.text(blocks * block + 2, y + 0.27, text, va="center", fontsize=8.5)
        axis.set_yticks([2.27, 1.27, 0.27], [f"S = {length}" for length in lengths])
        axis.set_xticks(range(0, 129, block))
        axis.set_xlim(0, 196)
        axis.set_ylim(-0.15, 2.8)
        axis.set_xlabel("token slots")
        axis.set_title("Waste in blocks of 16 is ceil(S / 16) × 16 − S, never a whole block")
        return figure
