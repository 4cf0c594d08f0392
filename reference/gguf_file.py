"""The tensors of a .gguf file as packed weights, read with the `gguf` package (imported only when a file is read).

A file mixes formats: of a "Q4_K_M" model with rows of 640, which 256 does not divide, most are Q5_0 and Q8_0.
Source: ggml `docs/gguf.md`.
"""

from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np

from pagebench.reference.dequant import Dequantize, default_contract
from pagebench.reference.dtypes import BFLOAT16, Array
from pagebench.reference.validation import require

# ggml's names of the types that have a decoder here.
FORMAT_OF = MappingProxyType({name.upper(): name for name in ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k")})


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """One tensor of a file. `data` is a read-only view of the file.

    type: ggml's name, as Q4_K or F32. shape: outermost dimension first, the reverse of the file's. data: for a type
    of packed blocks uint8 [..., bytes of a row], for F32, F16 and BF16 the numbers.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: Array

    @property
    def format(self) -> str | None:
        """The name of the format in `dequant_formats.FORMATS`; None where it has no decoder, or is not packed."""
        return FORMAT_OF.get(self.type)

    def problem(self, dtype: np.dtype[Any], contract: str | None = None) -> Dequantize:
        """Dequantisation of the whole tensor, dimensions before the last folded into n, from a copy of its bytes.

        Raises ValueError for a tensor whose type has no decoder.
        """
        format = self.format
        require(format is not None, "tensor", f"be of a type in {sorted(FORMAT_OF)}", f"{self.type} ({self.name})")
        assert format is not None
        k = self.shape[-1]
        blocks = np.array(self.data).reshape(-1, self.data.shape[-1])
        shape = (len(blocks), k)
        return Dequantize(format, {"blocks": blocks}, shape, None, dtype, contract or default_contract(format))


def read_gguf(path: str | PathLike[str]) -> dict[str, GgufTensor]:
    """Every tensor of the file by name, in the file's order.

    Raises ValueError for a file that is not a whole little-endian GGUF file, FileNotFoundError where there is none, and
    ImportError without the `gguf` package.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        tensors = [_tensor(each) for each in reader.tensors]
    except FileNotFoundError:
        raise
    except Exception as error:  # the package indexes and reshapes what it finds: any error means a broken file
        raise ValueError(f"path must be a GGUF file, got {str(path)!r}: {type(error).__name__}: {error}") from error
    require(reader.endianess == gguf.GGUFEndian.LITTLE, "path", "be a little-endian GGUF file", str(path))
    return {each.name: each for each in tensors}


def _tensor(found: Any) -> GgufTensor:
    data = np.asarray(found.data)
    if found.tensor_type.name == "BF16":  # the package leaves these as bytes
        data = data.view(BFLOAT16)
    shape = tuple(int(size) for size in reversed(found.shape))
    return GgufTensor(found.name, found.tensor_type.name, shape, data)
