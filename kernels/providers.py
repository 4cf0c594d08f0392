"""The provider contract, the registry, and conversions between host and device arrays.

A provider is any object with the attributes of `Provider`, and any subset of the op methods. The optional parts are
listed in OPTIONAL and looked up with `hasattr`: leaving one out only leaves some checks *not exercised*.
"""

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

OPS = (
    "paged_attention",
    "merge_states",
    "copy_blocks",
    "swap_blocks",
    "write_kv",
    "gather_kv",
    "dequantize",
    "dequant_gemv",
)
OPTIONAL = ("as_strided", "empty", "variants", "contract", "to_pinned")
ENTRY_POINTS = "pagebench.providers"  # where installed packages register theirs
OURS = {
    "triton": "pagebench.kernels.triton_provider:provider",
    "cupy": "pagebench.kernels.cupy_provider:provider",
}


@runtime_checkable
class Provider(Protocol):
    """What every provider has. Ops are methods named as in OPS; each takes a problem with device arrays.

    paged_attention(problem, **variant) -> (out, lse or None); merge_states(problem, **variant) -> (out, lse);
    copy_blocks, swap_blocks and write_kv(problem, **variant)
    -> None, in place on the problem's arrays; gather_kv(problem, **variant) -> (key, value); dequantize(problem,
    **variant) -> weight. Optional:

    - as_strided(base, dtype, shape, strides, offset): a view of `base`, a device array that `to_device` made of uint8
      [nbytes]; dtype a NumPy dtype, strides and offset in elements of it.
    - empty(shape, dtype): an uninitialised device array; a provider that takes its outputs and scratch from
      `self.empty` has them poisoned and fenced by the checks.
    - variants(problem) -> list of keyword dicts: the same op under other splits, tiles, warps.
    - to_pinned(array): the array in host memory that the device can reach, for the host's side of swap_blocks; without
      it that is a device array too.
    - contract(format) -> rounding contract of its dequantisation of `format`.
    """

    name: str

    def unavailable(self) -> str | None:
        """Why this machine cannot run the provider at all; None when it can."""

    def rejects(self, problem: Any) -> str | None:
        """Why this *host* problem is not supported, known before it runs; None when it is."""

    def to_device(self, array: np.ndarray[Any, Any]) -> Any: ...

    def to_host(self, array: Any) -> np.ndarray[Any, Any]: ...

    def synchronize(self) -> None: ...


def load_provider(spec: str) -> Provider:
    """The provider named `spec`: a registered name ("triton"), MODULE:NAME or PATH.py:NAME.

    A class is instantiated without arguments. Triton's interpreter is turned on first where there is no GPU, since a
    kernel's fate is settled when it is decorated. Raises ValueError for a name that leads nowhere or to no provider.
    """
    from pagebench.kernels import triton_interpreter

    triton_interpreter.activate()
    found = _named(OURS.get(spec, spec)) if spec in OURS or ":" in spec else _registered(spec)
    provider = found() if isinstance(found, type) else found
    missing = [
        name
        for name in ("name", "unavailable", "rejects", "to_device", "to_host", "synchronize")
        if not hasattr(provider, name)
    ]
    if missing:
        raise ValueError(
            f"provider must have the attributes of pagebench.kernels.providers.Provider, got {spec!r} without {missing}"
        )
    return provider  # type: ignore[no-any-return]  # checked by attribute


def registered_names() -> list[str]:
    """Names of the installed providers, ours and those of other packages (entry points `pagebench.providers`)."""
    return sorted({*OURS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def ops_of(provider: Provider) -> list[str]:
    """The ops that `provider` implements, in the order of OPS."""
    return [op for op in OPS if callable(getattr(provider, op, None))]


def how_it_runs(provider: Provider) -> str:
    """`gpu`, `interpreter` (Triton on a CPU) or `host`: where the provider's arrays live, and what works on them."""
    probe = provider.to_device(np.zeros(1, np.uint8))
    if _on_gpu(probe):
        return "gpu"
    return "interpreter" if getattr(provider, "interpreted", False) else "host"


def _on_gpu(array: Any) -> bool:
    device = getattr(array, "device", None)
    return getattr(device, "type", None) == "cuda" or type(array).__module__.startswith("cupy")


def _registered(name: str) -> Any:
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return entry.load()
    raise ValueError(f"provider must be one of {registered_names()}, MODULE:NAME or PATH.py:NAME, got {name!r}")


def _named(spec: str) -> Any:
    where, _, attribute = spec.rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where, spec)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"provider must name an attribute of {where}, got {spec!r}") from None


def _from_module(where: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not where.startswith(error.name):
            raise  # the module exists; something it needs does not
        raise ValueError(f"provider must name an importable module, got {spec!r}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"provider must name an existing file, got {str(path)!r}")
    name = f"pagebench_provider_{path.resolve().stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.resolve().parent) not in sys.path:
        sys.path.append(str(path.resolve().parent))  # its neighbours are importable, as a script's are
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
