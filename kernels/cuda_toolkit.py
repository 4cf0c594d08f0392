"""Where NVIDIA's CUDA headers are: the pip wheels that NVRTC and the host compiler both read."""

import importlib.util
import os
from pathlib import Path

_PACKAGES = "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"


class HeadersMissing(RuntimeError):  # noqa: N818  # says what is missing, as CompilerMissing does
    """The CUDA headers that a kernel includes are not installed."""


def include_dirs() -> tuple[Path, ...]:
    """Folders to pass as -I: the one with cuda_fp16.h and the one with cuda/std (the second only if it is separate).

    Looks into the `nvidia` wheels of this Python, then into $CUDA_PATH and $CUDA_HOME. Raises HeadersMissing.
    """
    for root in _candidates():
        if (root / "cuda_fp16.h").is_file() and (root / "crt" / "host_defines.h").is_file():
            cccl = root / "cccl"
            return (root, cccl) if cccl.is_dir() else (root,)
    raise HeadersMissing(f"CUDA headers (cuda_fp16.h, crt/host_defines.h) not found: python -m pip install {_PACKAGES}")


def _candidates() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    wheels = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    found = [path for wheel in wheels for path in sorted(wheel.glob("cu[0-9]*/include"), reverse=True)]
    toolkits = [os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME")]
    return found + [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
