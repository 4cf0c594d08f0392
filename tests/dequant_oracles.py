"""Other people's dequantisation, run on the same random bytes as the reference.

    python tests/dequant_oracles.py results/oracles.json

compares with every oracle that is installed and stores the number of elements and mismatches of each comparison;
oracles that are not installed keep what an earlier run stored. An oracle is a function in ORACLES that yields
Comparisons. What `known` says is a difference of meaning; test_dequant_oracles says which the reference takes, and why.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dequant_oracles_torch as larger
import numpy as np
from oracle_comparison import DTYPES, SCALES, Comparison, array_of, compare, problem, tensor, torch_dtype

from pagebench.reference.dequant import Dequantize
from pagebench.reference.dequant_formats import FORMATS
from pagebench.reference.dequant_gguf import GgufFormat
from pagebench.reference.dequant_layout import FLOAT8_E8M0
from pagebench.reference.dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT32

STORED_ROWS = 6700  # rows of three 256-element blocks for the stored run: 20,100 blocks of each K format


def gguf(rows: int = 100) -> Iterator[Comparison]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    for what, note in _gguf_problems(rows):
        kind = GGMLQuantizationType[_ggml_name(what.format)]
        with np.errstate(all="ignore"):
            yield compare(what, decode(what.packed["blocks"], kind), note)


def libgguf(rows: int = 100) -> Iterator[Comparison]:
    import libgguf as library
    from gguf import GGMLQuantizationType

    for what, note in _gguf_problems(rows):
        kind = GGMLQuantizationType[_ggml_name(what.format)]
        got = library.dequantize_rows(what.packed["blocks"], int(kind), n_per_row=what.shape[1])
        yield compare(what, got, note)


def _gguf_problems(rows: int) -> Iterator[tuple[Dequantize, str]]:
    for name, format in FORMATS.items():
        if isinstance(format, GgufFormat):
            for seed, scales in enumerate(SCALES):
                yield problem(name, (rows, 768), scales=scales, seed=seed), f"{scales} scales"


def _ggml_name(format: str) -> str:
    return format.upper()


def torch() -> Iterator[Comparison]:
    """torch's own float8 types, their products with float32 scales, and its e8m0."""
    import torch

    numbers = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    for format, number in numbers.items():
        for form in FORMATS[format].forms:
            for dtype in DTYPES:
                what = problem(format, (150, 260), form=form, dtype=dtype)
                scale = tensor(what.packed["scale"])
                if form == "channel":
                    scale = scale[:, None]
                elif form == "block":
                    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:150, :260]
                weight = tensor(what.packed["weight"]).view(number).float() * scale
                yield compare(what, array_of(weight.to(torch_dtype(dtype))))
    for number in (FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E8M0):
        codes = np.arange(256, dtype=np.uint8)
        got = tensor(codes).view(getattr(torch, number.name)).float()
        yield Comparison(f"codes of {number.name}", array_of(got), codes.view(number).astype(FLOAT32))


def ml_dtypes() -> Iterator[Comparison]:
    import ml_dtypes as library

    from pagebench.reference.dequant_layout import E2M1

    codes = np.arange(16, dtype=np.uint8)
    yield Comparison("codes of e2m1", codes.view(library.float4_e2m1fn).astype(FLOAT32), E2M1.astype(FLOAT32))


def gfloat() -> Iterator[Comparison]:
    from gfloat import decode_float
    from gfloat import formats as known

    from pagebench.reference.dequant_layout import E2M1, as_number

    for format, number in (
        (known.format_info_ocp_e4m3, FLOAT8_E4M3FN),
        (known.format_info_ocp_e5m2, FLOAT8_E5M2),
        (known.format_info_ocp_e8m0, FLOAT8_E8M0),
    ):
        got = np.array([decode_float(format, i).fval for i in range(256)])
        yield Comparison(f"codes of {number.name}", got, as_number(np.arange(256), number))
    got = np.array([decode_float(known.format_info_ocp_e2m1, i).fval for i in range(16)])
    yield Comparison("codes of e2m1", got, E2M1)


ORACLES: dict[str, Callable[..., Iterator[Comparison]]] = {
    "gguf": gguf,
    "ml_dtypes": ml_dtypes,
    "torch": torch,
    "libgguf": libgguf,
    "gfloat": gfloat,
    "bitsandbytes": larger.bitsandbytes,
    "compressed-tensors": larger.compressed_tensors,
    "torchao": larger.torchao,
    "transformers": larger.transformers,
    "optimum-quanto": larger.optimum_quanto,
    "gptqmodel": larger.gptqmodel,
}


def version(package: str) -> str | None:
    """The installed version; None where the package is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(path: Path) -> None:
    stored = json.loads(path.read_text()) if path.exists() else {}
    for package, oracle in ORACLES.items():
        found = version(package)
        if found is None:
            print(f"{package}: not installed")
            continue
        results = [
            {"what": c.what, "elements": int(c.want.size), "mismatches": c.mismatches}
            | ({"known": c.known} if c.known else {})
            for c in (oracle(rows=STORED_ROWS) if package in ("gguf", "libgguf") else oracle())
        ]
        stored[package] = {"version": found, "comparisons": results}
        wrong = [c for c in results if c["mismatches"]]
        print(f"{package} {found}: {sum(c['elements'] for c in results)} elements in {len(results)} comparisons")
        print("".join(f"    {c}\n" for c in wrong), end="")
    stored["reference"] = {"numpy": version("numpy"), "ml_dtypes": version("ml_dtypes")}
    path.write_text(_text(stored))


def _text(stored: dict[str, Any]) -> str:
    """JSON with one comparison to a line."""
    text = json.dumps(stored, indent=1)
    return re.sub(r'\{\s+"what".*?\}', lambda found: re.sub(r"\n\s*", " ", found[0]), text, flags=re.DOTALL) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
