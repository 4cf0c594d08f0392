"""What every op's problem shares: validation at construction, placement on a device, a runnable repro.

A problem is a frozen dataclass over NumPy arrays. `on(provider)` gives the same dataclass over device arrays.
"""

import base64
import dataclasses
import importlib
import json
import textwrap
import zlib
from typing import Any, ClassVar, Self

import numpy as np

from pagebench.reference import placement
from pagebench.reference.dtypes import Array


class Problem:
    """Base of the op dataclasses. `op` is the provider's method for it."""

    __slots__ = ()
    op: ClassVar[str]

    @property
    def pinned_fields(self) -> tuple[str, ...]:
        """Names of the fields whose arrays stay on the host, where the device can reach them."""
        return ()

    def validate(self) -> None:
        """Raise ValueError naming the argument, the rule and the value, unless this host problem is valid."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        self.validate()

    def on(self, provider: Any) -> Self:
        """The same problem with fresh copies of every array on the provider's device (see `placement`)."""
        return placement.place(self, provider).problem

    def bytes_moved(self) -> int:
        """The fewest bytes any kernel must move: each needed input byte read once, each output byte written once."""
        raise NotImplementedError

    def flops(self) -> int:
        """Floating-point operations of the op; 0 for pure data movement."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line per field: dtype, shape and strides of arrays, the value of anything else."""
        lines = [f"{type(self).__name__}:"]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every Problem is a dataclass
            lines += [f"  {name} = {_describe(value)}" for name, value in _flat(field.name, getattr(self, field.name))]
        return "\n".join(lines)

    def to_text(self) -> str:
        """ASCII text from which `from_text` rebuilds the problem, views on one base included."""
        return _encode(self)

    def repro(self, provider: str, variant: dict[str, Any] | None = None) -> str:
        """A Python snippet that runs this problem on the provider named `provider` and compares with the reference."""
        text = self.to_text()
        return textwrap.dedent("""\
            # {summary}
            from pagebench.kernels.providers import load_provider
            from pagebench.properties.contracts import check
            from pagebench.reference.problem import from_text

            problem = from_text(
            {text}
            )
            check(load_provider({provider!r}), problem, variant={variant!r})
            """).format(
            summary=self.describe().replace("\n", "\n# "),
            text="\n".join(f"    {text[i : i + 100]!r}" for i in range(0, len(text), 100)),
            provider=provider,
            variant=variant or {},
        )


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flat(f"{name}[{key!r}]", item)]
    if isinstance(value, tuple) and any(isinstance(item, np.ndarray) for item in value):
        return [pair for i, item in enumerate(value) for pair in _flat(f"{name}[{i}]", item)]
    return [(name, value)]


def _describe(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    text = f"{value.dtype} {list(value.shape)}"
    if not value.flags.c_contiguous:
        text += f" strides {[s // value.itemsize for s in value.strides]}"
    if value.size <= 16 and value.dtype.kind in "iu":
        text += f" {value.tolist()}"
    return text


# --- text form: {"class", "fields", "bases"}; arrays are views {"base", "dtype", "shape", "strides", "offset"} on bases


def _encode(problem: Problem) -> str:
    bases: dict[int, tuple[int, Array]] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.size == 0:
            return {"empty": value.shape, "dtype": value.dtype.name}
        if isinstance(value, np.ndarray):
            owner = placement.owner_of(value)
            index, _ = bases.setdefault(owner.ctypes.data, (len(bases), owner))
            offset = value.ctypes.data - owner.ctypes.data
            return {
                "base": index,
                "dtype": value.dtype.name,
                "shape": value.shape,
                "strides": value.strides,
                "offset": offset,
            }
        if isinstance(value, dict):
            return {"dict": {key: pack(item) for key, item in value.items()}}
        if isinstance(value, tuple):
            return {"tuple": [pack(item) for item in value]}
        if isinstance(value, np.generic):
            return {"scalar": value.item(), "dtype": value.dtype.name}
        return value.name if isinstance(value, np.dtype) else value

    names = [field.name for field in dataclasses.fields(problem) if field.init]  # type: ignore[arg-type]  # a dataclass
    packed = {name: pack(getattr(problem, name)) for name in names}
    where = f"{type(problem).__module__}:{type(problem).__name__}"
    data = [
        base64.b85encode(zlib.compress(placement.raw_bytes(owner).tobytes(), 9)).decode() for _, owner in bases.values()
    ]
    document = json.dumps({"class": where, "fields": packed, "bases": data})
    return base64.b85encode(zlib.compress(document.encode(), 9)).decode()


def from_text(*lines: str) -> Any:
    """The problem that `Problem.to_text` wrote. Raises ValueError for any other text."""
    try:
        document = json.loads(zlib.decompress(base64.b85decode("".join(lines))))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"lines must be the text of a problem, got {''.join(lines)[:40]!r}...") from error
    bases = [np.frombuffer(bytearray(zlib.decompress(base64.b85decode(b))), np.uint8) for b in document["bases"]]

    def unpack(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "empty" in value:
            return np.empty(tuple(value["empty"]), _dtype(value["dtype"]))
        if "scalar" in value:
            return _dtype(value["dtype"]).type(value["scalar"])
        if "dict" in value:
            return {key: unpack(item) for key, item in value["dict"].items()}
        if "tuple" in value:
            return tuple(unpack(item) for item in value["tuple"])
        return np.ndarray(
            tuple(value["shape"]),
            _dtype(value["dtype"]),
            buffer=bases[value["base"]].data,
            offset=value["offset"],
            strides=tuple(value["strides"]),
        )

    module, name = document["class"].split(":")
    if not module.startswith("pagebench.reference."):
        raise ValueError(f"lines must describe a problem of pagebench.reference, got {module}")
    cls = getattr(importlib.import_module(module), name)
    fields = {key: unpack(value) for key, value in document["fields"].items()}
    return cls(**{key: _dtype(value) if key == "dtype" else value for key, value in fields.items()})


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
