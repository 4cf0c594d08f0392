"""Every packed format as it is compiled: `python -m bench.dequant_codegen`, part of `nox -s codegen`; nothing runs.

All formats and forms, `dequantize` and the fused product with 1 and 16 rows, to float16 or another `--dtype`, by both
providers, for sm_80, sm_90 and sm_100, at 4096 x 4096: the other projections of a model differ in their grid only.
Exits with 1 where a kernel does not compile, spills or uses local memory, or moves its main stream in other accesses
than of 16 bytes, save for those that EXCEPTIONS names and gives a reason for.
"""

import sys
from collections.abc import Iterator, Sequence

from bench._codegen import _record_workload, _recording
from bench._codegen_sweep import local_memory_faults, parser_of, run_each, size_faults
from bench._launch import CompiledLaunch

SHAPE = (4096, 4096)
KERNELS = {"dequantize": 0, "gemv-m1": 1, "gemv-m16": 16}  # rows of x
_WORDS = "a thread takes a word for each 32 weights, and 32 weights take 2 words of 4 bytes: loads of 8"
_BLOCKS = "a block of bytes that are no multiple of 4: Triton loads from where it lies, aligned to 2 bytes"
_FIELDS = "fields straddle words: Triton loads the words of each field, which neighbours share in the L1 cache"

# Formats whose codes Triton loads in less than 16 bytes at a time. CUDA C++ stages the bytes as they lie, and has none.
EXCEPTIONS = {
    "pack_quantized_2": _WORDS,
    **dict.fromkeys(("pack_quantized_3", "pack_quantized_5", "pack_quantized_6", "pack_quantized_7"), _FIELDS),
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "q6_k"), _BLOCKS),
    "q4_1": "blocks of 20 bytes: loads of 4",
}


def faults(provider: str, format: str, kernel: str, launch: CompiledLaunch) -> list[str]:
    """What is wrong with the kernel that decodes, in words; empty when nothing is."""
    stats, found = launch.stats, local_memory_faults(launch)
    wide_loads = stats.global_loads.get(128, 0) + stats.async_copies.get(128, 0)
    if not wide_loads and not (provider == "triton" and format in EXCEPTIONS):
        found.append(f"no load of 16 bytes: {dict(stats.global_loads)}, {dict(stats.async_copies)}")
    if kernel == "dequantize":
        if not stats.global_stores.get(128):
            found.append(f"no store of 16 bytes: {dict(stats.global_stores)}")
        if provider == "triton" and set(stats.global_stores) != {128}:  # CUDA C++ has others for the ends of rows
            found.append(f"stores of less than 16 bytes: {dict(stats.global_stores)}")
    return found + size_faults(launch)


def launches(
    provider: str, arch: int, formats: Sequence[str] = (), dtype: str = "float16"
) -> Iterator[tuple[str, str, str, CompiledLaunch]]:
    """(format, form, name in KERNELS, the launch that decodes), in a process that `_codegen._isolate` prepared."""
    from bench.workloads import gemv, packed_weight
    from pagebench.kernels.providers import load_provider
    from pagebench.reference.dequant_formats import FORMATS
    from pagebench.reference.dtypes import COMPUTE_DTYPES

    (to,) = (known for known in COMPUTE_DTYPES if known.name == dtype)
    loaded = load_provider(provider)
    with _recording(arch) as recorded:
        for format in formats or FORMATS:
            for form in FORMATS[format].forms:
                weight = packed_weight(format, form, *SHAPE, to)
                for name, m in KERNELS.items():
                    recording = _record_workload(loaded, gemv(weight, m) if m else weight, recorded)
                    if not recording.launches:
                        raise RuntimeError(f"{provider} {format}: {recording.unavailable or recording.rejected}")
                    yield format, form, name, recording.launches[0]


def sweep(provider: str, arch: int, formats: Sequence[str] = (), dtype: str = "float16") -> int:
    """Print a line for each kernel, and what is wrong with it; how many have faults."""
    wrong = 0
    for format, form, name, launch in launches(provider, arch, formats, dtype):
        found = faults(provider, format, name, launch)
        wrong += bool(found)
        stats = launch.stats
        figures = (
            f"{stats.registers} registers, {stats.instructions} instructions, {launch.programs_per_sm} programs/SM"
        )
        print(
            f"{provider} sm_{arch} {name} {format} {form} {dtype}: {figures}" + "".join(f"; WRONG: {f}" for f in found)
        )
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of("bench.dequant_codegen", __doc__)
    parser.add_argument("--format", action="append", default=[], help="all by default")
    parser.add_argument(
        "--dtype", default="float16", choices=("float16", "bfloat16", "float32"), help="float16 by default"
    )
    chosen = parser.parse_args(arguments)
    words = [word for name in chosen.format for word in ("--format", name)] + ["--dtype", chosen.dtype]
    return run_each("bench.dequant_codegen", chosen, words, lambda *where: sweep(*where, chosen.format, chosen.dtype))


if __name__ == "__main__":
    sys.exit(main())
