"""Describe this machine to asv under a name, the same way every time.

asv takes every word of the description as part of a series' name: after a kernel upgrade, or with a few kilobytes more
memory, all series would start anew. So the operating system is written without its version and the memory rounded, and
what is stored with earlier results under the same name is kept as it is.
"""

import json
import os
import platform
from pathlib import Path

from pagebench.kernels.devices import gpu_name

MACHINE_FILE = Path("~/.asv-machine.json")
_GIB = 1 << 30


def pin(name: str, results_dir: Path, machine_file: Path = MACHINE_FILE) -> dict[str, str]:
    """Enter machine `name` into asv's machine file, as stored in `results_dir` if it is there; the description.

    To be called before `asv run --machine NAME`. ValueError for a name that cannot be a folder's.
    """
    if not name or name != Path(name).name or name.startswith("."):
        raise ValueError(f"machine must be a plain folder name, got {name!r}")
    stored = results_dir / name / "machine.json"
    description = json.loads(stored.read_text()) if stored.is_file() else describe(name)
    description.pop("version", None)  # of asv's file format
    path = machine_file.expanduser()
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | {name: description, "version": 1}, indent=4))
    return dict(description)


def describe(name: str) -> dict[str, str]:
    """What asv stores about this machine; with a GPU, its name too."""
    gpu = gpu_name()
    description = {
        "machine": name,
        "os": platform.system(),
        "arch": platform.machine(),
        "cpu": _cpu(),
        "num_cpu": str(os.cpu_count()),
        "ram": f"{round(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB)} GiB",
    }
    return description | ({"gpu": gpu} if gpu else {})


def _cpu() -> str:
    """The CPU's own name, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
