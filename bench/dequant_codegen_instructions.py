"""Instructions that the CUDA C++ fused product issues for a weight at m = 1: `-m bench.dequant_codegen_instructions`.

The source is compiled by NVRTC with what holds for almost every step of a large weight taken for granted (ASSUMED: a
whole step, at most 8 rows of x, usual scales, one group), so that the loop that multiplies holds nothing else; its
instructions over a lane's weights are the figure. A scale is loaded at every step there, but for GPTQ and AWQ, where a
group begins at every fourth: a step is 32 rows of a group of 128.

An H200 issues ISSUES warp instructions a second. At 75 % of its 4.8 TB/s, `affordable` is how many of them there are
for a weight of a format.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pagebench.kernels
from bench import _sass
from bench._record_cuda import nvrtc_compile

KERNELS = Path(next(iter(pagebench.kernels.__path__)))
ISSUES = 132 * 4 * 1.755e9  # SMs, schedulers, Hz
BANDWIDTH = 0.75 * 4.8e12  # bytes a second
ARCH = 90

# name in workloads.FUSED: (kernel, a lane's weights of a step, packed bytes of a weight)
FUSED = {
    "gptq": ("dequant_gemv_columns<Gptq, __half>", 64, 0.5 + 2.5 / 128),
    "awq": ("dequant_gemv_columns<Awq, __half>", 64, 0.5 + 2.5 / 128),
    "fp8-block": ("dequant_gemv_rows<Fp8, __half>", 32, 1.0),
    "int8-channel": ("dequant_gemv_rows<Int8, __half>", 32, 1.0),
    "mxfp4": ("dequant_gemv_rows<Mxfp4, __half>", 32, 0.5 + 1 / 32),
    "nvfp4": ("dequant_gemv_rows<Nvfp4, __half>", 32, 0.5 + 1 / 16),
    "q8_0": ("dequant_gemv_rows<Q8Zero, __half>", 32, 34 / 32),
    "q4_k": ("dequant_gemv_rows<Q4K, __half>", 32, 144 / 256),
}

ASSUMED = {
    "live && at + RUNS * RUN <= count": "true",
    "input.wide && column + RUNS * RUN <= input.k && input.rows <= 8": "true",
    "input.wide && input.rows <= 8": "true",
    "if (live)": "if (true)",
    "for (int high = 0; high < 4; high += 2)": "for (int high = 0; high < 2; high += 2)",
    "e < 99 || e > 128": "false",
    "p.mode & 4": "false",
    "(p.mode & 2)": "(false)",
    "p.mode & 1 ? __fdiv_rn": "false ? __fdiv_rn",
    "p.mode & 1 ? p.arrays.at<signed char>": "false ? p.arrays.at<signed char>",
    "128, p.mode & 2, values": "128, false, values",
    "p.mode ?": "false ?",
    "!p.mode && (((word & 0x7F7F7F7Fu)": "false && (((word & 0x7F7F7F7Fu)",
    "if (group == known.group) return;": "",
    "if (kind == kFloat) return at<float>(i, row, column);": "return at<float>(i, row, column);",
    "(at & 7) == 0": "true",
    "(at & 15) == 0": "true",
    "RUNS == 1 || first.all": "true",
    "if (group.whole)": "if (true)",
    "if (p.group == 0) return;": "return;",
    "left = column < n ? min(end - row, ROWS) : 0;": "left = ROWS;",
    "if (from >= end || feature0 >= n) continue;": "",
    "end - from >= STEP ? group_of_step(from, done) : MIXED": "group_of_step(from, done)",
    "if (of_step != MIXED) {": "if (true) {",
    "if (of_group == MIXED)": "if (false)",
    "else if (scale_kind == kHalf)": "else",
    "    else\n      add_group(__nv_bfloat16{});\n": "",
    "if (!high || rows > 8)": "if (!high)",
    "if (p.mode & 1)": "if (true)",
    "i < rows": "true",
    "if (rows > 8)": "if (false)",
    "if (row >= rows || column >= k) return;": "",
    "if (wide && column + RUN <= k)": "if (true)",
}


# GPTQ and AWQ within a group, whose scale and zero point its sums get when it is over. GPTQ's groups of 512 rows are
# read at every 16th step, and counted as if at every fourth.
SAME_GROUP = {
    "if (of_step != of_group) {": "if (false) {",
    "if (Format::BY_ROW && done % CHUNK == 0) {": "if (false) {",
}
STEPS_OF_A_GROUP = 4


def source(assumed: Mapping[str, str]) -> str:
    """dequant_gemv.cu and what it includes, in one text; ValueError for a condition that is not in it."""
    included: set[str] = set()

    def text_of(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = (KERNELS / name).read_text().replace("#pragma once", "")
        return re.sub(r'#include "(dequant_\w+\.cuh)"\n', lambda found: text_of(found.group(1)), text)

    text = text_of("dequant_gemv.cu")
    for condition, holds in assumed.items():
        if condition not in text:
            raise ValueError(f"assumed must hold conditions of the kernels, got {condition!r}")
        text = text.replace(condition, holds)
    return text


def per_weight(name: str) -> float:
    """Warp instructions for each 32 weights of format `name` of FUSED."""
    kernel, weights, _ = FUSED[name]
    loop = _loop(kernel, ASSUMED)
    if "columns" in kernel:
        bare = _loop(kernel, ASSUMED | SAME_GROUP)
        return (bare + (loop - bare) / STEPS_OF_A_GROUP) / weights
    return loop / weights


def _loop(kernel: str, assumed: Mapping[str, str]) -> int:
    """Instructions of the shortest loop with a matrix instruction."""
    module = nvrtc_compile(source(assumed), ("-std=c++17", f"-I{KERNELS}"), (kernel,), ARCH)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(module.cubin)
        file.flush()
        listing = _sass._listings(_sass._run(_sass.tool("nvdisasm"), "-c", file.name))[module.symbol(kernel)]
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in listing:
        if found := _sass._LABEL.match(line):
            labels[found.group(1)] = len(instructions)
        elif _sass._INSTRUCTION.match(line):
            instructions.append(line)
            back = _sass._BRANCH.search(line)
            if back and back.group(1) in labels:
                body = instructions[labels[back.group(1)] :]
                loops.append(len(body) if any("HMMA" in each for each in body) else sys.maxsize)
    return min(loops)


def affordable(name: str) -> float:
    """The same that an H200 issues while it reads a weight at 75 % of its bandwidth."""
    return ISSUES * 32 / (BANDWIDTH / FUSED[name][2])


def main() -> None:
    for name in FUSED:
        print(f"{name:14} {per_weight(name):6.2f} instructions a weight, {affordable(name):5.2f} affordable")


if __name__ == "__main__":
    main()
