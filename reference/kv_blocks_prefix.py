"""When two full blocks hold the same keys and values: equal tokens, after an equal prefix, under equal extra keys.

A block's key is a hash chained on its parent's, so that equal tokens after different prefixes have different keys.
Extra keys are what else decides the values: a LoRA adapter, an image whose placeholder tokens look like another's.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from pagebench.reference.kv_blocks_pool import Key
from pagebench.reference.validation import require

Extra = str | bytes | int
Placed = Sequence[tuple[int, Extra]]  # (offset in the block, extra key)
ROOT: Key = b""  # parent of a sequence's first block
TOKEN_LIMIT = 1 << 63


def block_key(parent: Key, tokens: Sequence[int], extras: Sequence[Extra] = (), placed: Placed = ()) -> Key:
    """SHA-256 of the parent's key, the block's tokens and its extra keys; equal only if all of them are.

    Raises ValueError for a token outside 64 bits or an extra key that is not a str, bytes or int.
    """
    digest = hashlib.sha256(parent)
    digest.update(b"%d,%d,%d:" % (len(parent), len(tokens), len(extras)))
    try:
        digest.update(array("q", tokens))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"tokens must be integers of 64 bits, got {tokens!r}") from error
    for extra in extras:
        digest.update(_tagged(extra))
    for offset, extra in placed:
        digest.update(b"@%d:" % offset + _tagged(extra))
    return digest.digest()


def _tagged(extra: Extra) -> bytes:
    """The extra key with its type and length in front, so that no two lists of them read the same."""
    require(type(extra) in (str, bytes, int), "extras", "hold str, bytes or int only", extra)
    text = extra if isinstance(extra, bytes) else str(extra).encode("utf-8", "surrogatepass")
    return b"%b%d:%b" % (type(extra).__name__.encode(), len(text), text)


def placed_by_block(
    placed_extras: Mapping[int, Extra], length: int, block_size: int
) -> dict[int, list[tuple[int, Extra]]]:
    """Extra keys at token positions, by block. ValueError for a position outside the prompt's `length` tokens."""
    by_block: dict[int, list[tuple[int, Extra]]] = {}
    for position in placed_extras:
        inside = isinstance(position, int) and 0 <= position < length
        require(inside, "placed_extras", f"have positions in [0, {length})", position)
    for position in sorted(placed_extras):
        extra = placed_extras[position]
        _tagged(extra)  # rejects a bad one
        by_block.setdefault(position // block_size, []).append((position % block_size, extra))
    return by_block


def require_several(extras: object) -> None:
    """Refuse one str or bytes for `extras`, whose letters would be extra keys."""
    require(not isinstance(extras, str | bytes), "extras", "be several keys, not one", extras)


def chained_keys(
    tokens: Sequence[int],
    block_size: int,
    extras: Sequence[Extra] = (),
    placed_extras: Mapping[int, Extra] | None = None,
) -> list[Key]:
    """The keys of every full block of `tokens`.

    extras apply from the first block on (a LoRA adapter, a tenant's salt); placed_extras map a token position to an
    extra key of the block that holds it (an image at its first placeholder), and through the chain of all later ones.
    """
    require_several(extras)
    by_block = placed_by_block(placed_extras or {}, len(tokens), block_size)
    keys: list[Key] = []
    parent = ROOT
    for block in range(len(tokens) // block_size):
        inside = tokens[block * block_size : (block + 1) * block_size]
        parent = block_key(parent, inside, extras, by_block.get(block, ()))
        keys.append(parent)
    return keys
