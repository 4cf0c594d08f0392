"""What a compiled kernel tells about its speed before it runs: read from the cubin with NVIDIA's disassembler.

`disassemble(cubin)` gives one `KernelStats` per kernel: registers, stack, spills, shared memory, and the counts of the
instructions that decide how fast a memory-bound kernel can be. `programs_per_sm` turns them into occupancy. All of it
is exact and repeatable: the same cubin always gives the same numbers, and no GPU is needed.

The tools come from the Triton wheel (`triton/backends/nvidia/bin`), so that every machine reads with the same version.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# From compute capability 9.0 on, a kernel that uses shared memory has this much of it, reserved by the system, counted
# in the SHARED figure of cuobjdump. On 8.0 it is taken as well, but not counted.
RESERVED_SHARED_BYTES = 1024

# Matrix instructions by the unit that they drive, fastest first. A kernel that falls from one row to a later one has
# lost its tensor cores' full rate, which no register count shows.
MATRIX_CLASSES: tuple[tuple[str, ...], ...] = (
    ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),  # sm_100: operands from shared memory, sums in tensor memory
    ("HGMMA", "QGMMA", "IGMMA", "BGMMA"),  # sm_90: a warp group, operands from shared memory
    ("HMMA", "QMMA", "IMMA", "BMMA", "DMMA", "OMMA"),  # sm_80 and up: one warp, operands in registers
)
MATRIX_MNEMONICS = tuple(name for row in MATRIX_CLASSES for name in row)

_WIDTH_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_BULK_COPIES = ("UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UBLKCP", "UBLKPF", "UBLKRED")

_FUNCTION_USE = re.compile(r"Function (\S+?):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+),")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\sBRA\b.*`\((\.L_x_\d+)\)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")


class DisassemblyError(RuntimeError):
    """The disassembler failed, or printed something that this module does not understand."""


@dataclass(frozen=True, slots=True)
class KernelStats:
    """One compiled kernel. Byte counts are per thread (stack) or per program (shared); counts are static instructions.

    `global_loads`, `global_stores` and `async_copies` (global to shared, LDGSTS) map the width in bits of one thread's
    access to the number of such instructions; `matrix` maps the mnemonic (HMMA, HGMMA, UTCHMMA, ...) likewise.
    `instructions` leaves out NOP, which is padding. `spills` are loads and stores of local memory; a local array
    counts too, and costs the same.

    `order` spells the kernel from top to bottom: L and S for a global load and store of 16 bytes per thread, B for a
    barrier, [ where a loop begins and ] where a branch goes back to such a place.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    instructions: int
    local_loads: int
    local_stores: int
    global_loads: Mapping[int, int]
    global_stores: Mapping[int, int]
    async_copies: Mapping[int, int]
    bulk_copies: int
    generic_accesses: int
    atomics: int
    shared_loads: int
    shared_stores: int
    shuffles: int
    barriers: int
    matrix: Mapping[str, int]
    order: str = ""

    @property
    def spills(self) -> int:
        return self.local_loads + self.local_stores

    @property
    def narrow_accesses(self) -> int:
        """Global accesses (loads, stores, asynchronous copies) of less than 16 bytes per thread."""
        widths = (self.global_loads, self.global_stores, self.async_copies)
        return sum(count for table in widths for bits, count in table.items() if bits < 128)

    @property
    def matrix_class(self) -> int:
        """Row of the fastest matrix instruction used, in `MATRIX_CLASSES`; their number when there is none."""
        return next(
            (row for row, names in enumerate(MATRIX_CLASSES) if any(self.matrix.get(n) for n in names)),
            len(MATRIX_CLASSES),
        )


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one streaming multiprocessor holds. Bytes include the reserved shared memory of every program."""

    sm_count: int
    shared_bytes: int
    shared_bytes_per_program: int
    registers: int = 65_536
    warps: int = 64
    programs: int = 32
    tensor_memory_columns: int = 0


# CUDA C++ Programming Guide, "Technical specifications per compute capability"; SM counts of the A100, H100/H200 (SXM)
# and B200.
SM_LIMITS: Mapping[int, SmLimits] = {
    80: SmLimits(sm_count=108, shared_bytes=164 * 1024, shared_bytes_per_program=163 * 1024),
    90: SmLimits(sm_count=132, shared_bytes=228 * 1024, shared_bytes_per_program=227 * 1024),
    100: SmLimits(
        sm_count=148, shared_bytes=228 * 1024, shared_bytes_per_program=227 * 1024, tensor_memory_columns=512
    ),
}
ARCHS: tuple[int, ...] = tuple(SM_LIMITS)


def limits_of(arch: int) -> SmLimits:
    """Limits of compute capability `arch` (80, 90 or 100); ValueError for another."""
    if arch not in SM_LIMITS:
        raise ValueError(f"arch must be one of {list(ARCHS)}, got {arch!r}")
    return SM_LIMITS[arch]


def programs_per_sm(
    arch: int, *, threads: int, registers: int, shared_bytes: int, tensor_memory_columns: int = 0
) -> int:
    """Programs (CUDA blocks) of a kernel that one SM runs at once; 0 when not even one fits.

    `threads` per program, `registers` per thread, `shared_bytes` per program (static and dynamic, without the reserved
    part). The allocation rules are those of NVIDIA's cuda_occupancy.h for compute capability 8.0 and up: registers by
    warp in units of 256 from one of the SM's four partitions, shared memory in units of 128 bytes, and a program's
    warps rounded up to whole rows of the partitions where the hardware checks that one fits at all.
    """
    limits = limits_of(arch)
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads must lie in 1..1024, got {threads}")
    if shared_bytes > limits.shared_bytes_per_program or registers > 255:
        return 0
    warps = _round_up(threads, 32) // 32
    registers_per_warp = _round_up(max(registers, 1) * 32, 256)
    if registers_per_warp * _round_up(warps, 4) > limits.registers:
        return 0
    bounds = [
        limits.programs,
        limits.warps // warps,
        limits.registers // 4 // registers_per_warp * 4 // warps,
        limits.shared_bytes // _round_up(shared_bytes + RESERVED_SHARED_BYTES, 128),
    ]
    if tensor_memory_columns:
        bounds.append(limits.tensor_memory_columns // tensor_memory_columns)
    return min(bounds)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@cache
def tool(name: str) -> str:
    """Path of one of the CUDA tools in the Triton wheel ("cuobjdump", "nvdisasm", "ptxas")."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise DisassemblyError(f"{name} is not where the Triton wheel keeps it ({path})")
    return str(path)


def disassemble(cubin: bytes, arch: int) -> dict[str, KernelStats]:
    """Statistics of every kernel in `cubin`, compiled for `arch` (80, 90, 100), by its name in the symbol table."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tool("cuobjdump"), "-res-usage", file.name)
        text = _run(tool("nvdisasm"), "-c", file.name)
    return parse(usage, text, arch)


def parse(usage: str, text: str, arch: int) -> dict[str, KernelStats]:
    """The same from the output of `cuobjdump -res-usage` and of `nvdisasm -c`."""
    reserved = RESERVED_SHARED_BYTES if arch >= 90 else 0
    listings = _listings(text)
    opcodes = {name: _opcodes(lines) for name, lines in listings.items()}
    found = _FUNCTION_USE.findall(usage)
    if not found:
        raise DisassemblyError(f"no kernel in the resource usage: {usage.strip()[:200]!r}")
    stats: dict[str, KernelStats] = {}
    for name, registers, stack, shared, _local in found:
        if not opcodes.get(name):
            raise DisassemblyError(f"no instruction of kernel {name!r} in the disassembly")
        static_shared = max(int(shared) - reserved, 0)
        stats[name] = _count(opcodes[name], int(registers), int(stack), static_shared, _order(listings[name]))
    return stats


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DisassemblyError(f"{Path(command[0]).name} exited with {done.returncode}: {done.stderr.strip()[:500]}")
    return done.stdout


def _listings(text: str) -> dict[str, list[str]]:
    """The lines of each function, by the text section that they stand in."""
    functions: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if section := _SECTION.match(line):
            current = functions.setdefault(section.group(1), [])
        elif line.lstrip().startswith(".section\t"):
            current = None
        elif current is not None:
            current.append(line)
    return functions


def _opcodes(lines: list[str]) -> Counter[str]:
    """Counts of full opcodes (with modifiers)."""
    return Counter(found.group(1) for line in lines if (found := _INSTRUCTION.match(line)))


def _order(lines: list[str]) -> str:
    """What `KernelStats.order` says."""
    labels = {found.group(1): at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    back = {
        at: labels[found.group(1)]
        for at, line in enumerate(lines)
        if (found := _BRANCH.search(line)) and labels.get(found.group(1), at) < at
    }
    begins = set(back.values())
    return "".join(_letter(line, at in begins, at in back) for at, line in enumerate(lines))


def _letter(line: str, begins: bool, goes_back: bool) -> str:
    if begins or goes_back:
        return "[" if begins else "]"
    found = _INSTRUCTION.match(line)
    name, *modifiers = found.group(1).split(".") if found else [""]
    if name == "BAR":
        return "B"
    return {"LDG": "L", "STG": "S"}.get(name, "") if "128" in modifiers else ""


def _count(
    opcodes: Counter[str], registers: int, stack_bytes: int, static_shared_bytes: int, order: str
) -> KernelStats:
    by_name: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        by_name[opcode.partition(".")[0]] += count

    def total(*names: str) -> int:
        return sum(by_name[name] for name in names)

    return KernelStats(
        registers=registers,
        stack_bytes=stack_bytes,
        static_shared_bytes=static_shared_bytes,
        instructions=sum(by_name.values()) - by_name["NOP"],
        local_loads=total("LDL"),
        local_stores=total("STL"),
        global_loads=_widths(opcodes, "LDG"),
        global_stores=_widths(opcodes, "STG"),
        async_copies=_widths(opcodes, "LDGSTS"),
        bulk_copies=total(*_BULK_COPIES),
        generic_accesses=total("LD", "ST"),
        atomics=total("ATOM", "ATOMG", "RED", "REDG"),
        shared_loads=total("LDS", "LDSM"),
        shared_stores=total("STS", "STSM"),
        shuffles=total("SHFL"),
        barriers=total("BAR"),
        matrix={name: by_name[name] for name in MATRIX_MNEMONICS if by_name[name]},
        order=order,
    )


def _widths(opcodes: Counter[str], name: str) -> dict[int, int]:
    """Instructions `name` by the width in bits of one thread's access."""
    widths: Counter[int] = Counter()
    for opcode, count in opcodes.items():
        mnemonic, *modifiers = opcode.split(".")
        if mnemonic == name:
            widths[next((_WIDTH_BITS[m] for m in modifiers if m in _WIDTH_BITS), 32)] += count
    return dict(sorted(widths.items()))
