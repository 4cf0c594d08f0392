"""Give asv's environment the packages of the Python that runs asv, so that no environment downloads torch.

asv makes one virtual environment and installs each commit's wheel into it (asv.conf.json). Everything else, torch and
Triton first, is shared: this links the packages of asv's own Python into a folder of the environment and names that
folder in a `.pth` file. What belongs to this project is left out. A module that the measured commit does not have yet
must be missing there, not silently come from the working copy, which the namespace package `pagebench` would allow.

The folder is also made one of `site.getsitepackages()`, where CuPy looks for NVIDIA's libraries.

`asv.conf.json` runs it with the environment's own Python: python bench/_asv_env.py ENVIRONMENT_FOLDER
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VARIABLE = "PAGEBENCH_SHARED_PYTHON"
OWN = ("pagebench", "__editable__")
# What asv installs into its environment itself; the environment's copies come first on the path in any case.
ENVIRONMENT_OWN = ("pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack")


def share(environment: Path) -> Path:
    """Link the shared packages below `environment`; the folder of links. RuntimeError if asv's Python is not found."""
    prefix = environment / "shared"
    links = prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    links.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for folder in reversed(_package_folders()) for entry in _entries(folder)}
    for link in links.iterdir():
        if link.name not in wanted or link.readlink() != wanted[link.name]:
            link.unlink()
    for name, target in wanted.items():
        if not (links / name).is_symlink():
            (links / name).symlink_to(target)
    lines = f"{links}\nimport site; site.PREFIXES.append({str(prefix)!r})\n"
    (Path(sysconfig.get_path("purelib")) / "pagebench-shared.pth").write_text(lines)
    return links


def _entries(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if _is_shared(entry.name)]


def _is_shared(name: str) -> bool:
    if name.startswith(OWN) or name == "__pycache__" or name.endswith(".pth"):
        return False
    return name.partition("-")[0] not in ENVIRONMENT_OWN


def _package_folders() -> list[Path]:
    """The folders from which asv's own Python imports packages, first to last."""
    python = _asv_python()
    code = "import json, sys; print(json.dumps([sys.version_info[:2], sys.path]))"
    output = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    version, path = json.loads(output)
    if tuple(version) != sys.version_info[:2]:
        raise RuntimeError(f"asv runs on Python {version}, but its environment has {sys.version_info[:2]}")
    folders = [Path(entry) for entry in path if entry.endswith(("site-packages", "dist-packages"))]
    return [folder for folder in folders if folder.is_dir()]


def _asv_python() -> str:
    """The Python that runs asv: named by a variable, or else the parent process, or the active environment."""
    if named := os.environ.get(VARIABLE):
        return named
    command = Path(f"/proc/{os.getppid()}/cmdline")
    parent = command.read_bytes().decode().split("\0")[0] if command.is_file() else ""
    inactive = os.pathsep.join(path for path in os.get_exec_path() if Path(path) != Path(sys.executable).parent)
    active_environment = str(Path(os.environ.get("VIRTUAL_ENV", "/nowhere"), "bin", "python"))
    for candidate in (parent, active_environment):
        found = shutil.which(candidate, path=inactive)
        if found and "python" in Path(found).name:
            return found
    raise RuntimeError(f"cannot tell which Python runs asv; set {VARIABLE} to its path")


if __name__ == "__main__":
    share(Path(sys.argv[1]).resolve())
