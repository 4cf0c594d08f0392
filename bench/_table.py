"""Plain text tables."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns as wide as their widest cell, a rule below the head."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
