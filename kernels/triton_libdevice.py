"""CUDA's libdevice functions (`tl.extra.libdevice.tanh` and the like) in the interpreter, which has only empty stubs.

Each is computed in float64 and rounded once: the libdevice ones err by an ulp or two, the `fast_` ones by more.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter

from pagebench.kernels.triton_numerics import Array, to_integer

_SAME_NAME = (
    "tanh exp exp2 expm1 log log2 log10 log1p sqrt cbrt sin cos tan sinh cosh asin acos atan asinh acosh atanh atan2 "
    "hypot ceil floor trunc rint fabs copysign fmod nextafter"
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in _SAME_NAME.split()}
_FUNCTIONS |= {
    "pow": np.power,
    "powi": np.power,
    "exp10": lambda x: np.power(10.0, x),
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "nearbyint": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "saturate": lambda x: np.fmax(np.fmin(x, 1.0), 0.0),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "fma": lambda x, y, z: x * y + z,
    "fdivide": np.divide,
    "fdiv_rn": np.divide,
    "frcp_rn": np.reciprocal,
    "fsqrt_rn": np.sqrt,
    "fadd_rn": np.add,
    "fsub_rn": np.subtract,
    "fmul_rn": np.multiply,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "finite": np.isfinite,
    "float2int_rn": np.rint,
    "llrint": np.rint,
}


def extern_elementwise(symbol: str, arguments: list[Array], dtype: np.dtype[Any]) -> Array:
    """libdevice's `symbol` ("__nv_tanhf") of `arguments`, as `dtype`; NotImplementedError for one that is not here."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"libdevice's {symbol} has no counterpart in the interpreter")
    result = np.asarray(function(*(a.astype(np.float64) if a.dtype.kind == "f" else a for a in arguments)))
    return to_integer(result, dtype) if dtype.kind in "iu" and result.dtype.kind == "f" else result.astype(dtype)


def install() -> None:
    """Put the functions in place of the stubs, for modules imported from now on."""
    for name, function in list(vars(cuda_libdevice).items()):
        if hasattr(function, "__wrapped__") and hasattr(libdevice, name):
            setattr(libdevice, name, _called_from_a_kernel(function))


def _called_from_a_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "_semantic": interpreter.interpreter_semantic})

    return call
