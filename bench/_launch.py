"""One kernel launch as it was compiled: what the launcher chose, and what the compiler made of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench._sass import KernelStats, limits_of, programs_per_sm


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """A launch recorded without a GPU. `grid` counts programs (CUDA blocks) in x, y, z; `threads` are per program.

    `num_warps` and `num_stages` are Triton's (None for CUDA C++). `dynamic_shared_bytes` is what the launch asks for
    beside the kernel's static shared memory; `tensor_memory_columns` is Blackwell's. `ptx` is the text that ptxas or
    NVRTC compiled, where rounding modes, fused multiply-adds and TF32 can be looked for.
    """

    kernel: str
    backend: str
    arch: int
    grid: tuple[int, int, int]
    threads: int
    dynamic_shared_bytes: int
    tensor_memory_columns: int
    num_warps: int | None
    num_stages: int | None
    stats: KernelStats
    ptx: str

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def shared_bytes(self) -> int:
        """Static and dynamic shared memory of one program."""
        return self.stats.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def programs_per_sm(self) -> int:
        return programs_per_sm(
            self.arch,
            threads=self.threads,
            registers=self.stats.registers,
            shared_bytes=self.shared_bytes,
            tensor_memory_columns=self.tensor_memory_columns,
        )

    @property
    def warps_per_sm(self) -> int:
        """Warps that one SM keeps resident; `SmLimits.warps` (64) is full occupancy."""
        return self.programs_per_sm * -(-self.threads // 32)

    @property
    def waves(self) -> float:
        """Programs over what the whole GPU of `arch` runs at once: below 1, SMs stay idle."""
        resident = self.programs_per_sm * limits_of(self.arch).sm_count
        return self.programs / resident if resident else float("inf")

    def to_json(self, *, with_ptx: bool = True) -> dict[str, Any]:
        """Plain data; `ptx`, some 100 kB, is left out on request. Derived figures are added for a reader."""
        data = asdict(self)
        if not with_ptx:
            del data["ptx"]
        data["derived"] = {
            "programs": self.programs,
            "shared_bytes": self.shared_bytes,
            "spills": self.stats.spills,
            "narrow_accesses": self.stats.narrow_accesses,
            "programs_per_sm": self.programs_per_sm,
            "warps_per_sm": self.warps_per_sm,
            "waves": round(self.waves, 3),
        }
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CompiledLaunch":
        """The launch that `to_json` wrote, once through a JSON file or not."""
        fields = {name: value for name, value in data.items() if name != "derived"}
        stats = dict(fields.pop("stats"))
        for name in ("global_loads", "global_stores", "async_copies"):
            stats[name] = {int(bits): count for bits, count in stats[name].items()}
        grid = fields.pop("grid")
        return cls(stats=KernelStats(**stats), grid=(grid[0], grid[1], grid[2]), ptx=fields.pop("ptx", ""), **fields)


def full_grid(grid: Any) -> tuple[int, int, int]:
    """`grid` of one to three counts, filled with ones; ValueError for another length or a negative count."""
    counts = (int(grid),) if isinstance(grid, int) else tuple(int(count) for count in grid)
    if not 1 <= len(counts) <= 3 or any(count < 0 for count in counts):
        raise ValueError(f"grid must be one to three counts >= 0, got {grid!r}")
    x, y, z = (*counts, 1, 1)[:3]
    return x, y, z
