"""Which GPU this process would use, asked without starting CUDA.

NVML is read through ctypes: no torch, no CUDA context, so a process may still fork afterwards.
"""

import ctypes
import os
from contextlib import suppress

_NVML_SUCCESS = 0


def gpu_present() -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves this process at least one NVIDIA GPU with a working driver."""
    return gpu_name() is not None


def gpu_name() -> str | None:
    """Name of the first visible GPU, as "NVIDIA H200"; None where there is none.

    A number in CUDA_VISIBLE_DEVICES counts in PCI order here; CUDA itself does so only under
    CUDA_DEVICE_ORDER=PCI_BUS_ID, which matters only on a machine with GPUs of different kinds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != _NVML_SUCCESS:
        return None
    try:
        return _name(nvml, first)
    finally:
        nvml.nvmlShutdown()


def _name(nvml: ctypes.CDLL, device: str) -> str | None:
    """`device`: an index, or the start of a UUID as CUDA accepts it ("GPU-8932f937", "MIG-...")."""
    for handle in _handles(nvml, device):
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetName(handle, text, len(text)) == _NVML_SUCCESS:
            return text.value.decode()
    return None


def _handles(nvml: ctypes.CDLL, device: str) -> list[ctypes.c_void_p]:
    handle = ctypes.c_void_p()
    with suppress(ValueError):
        found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
        return [handle] if found == _NVML_SUCCESS else []
    if nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle)) == _NVML_SUCCESS:
        return [handle]
    return [h for h in _all_handles(nvml) if _uuid(nvml, h).startswith(device)]


def _all_handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return [handle for i in range(count.value) for handle in _handles(nvml, str(i))]


def _uuid(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(96)
    return text.value.decode() if nvml.nvmlDeviceGetUUID(handle, text, len(text)) == _NVML_SUCCESS else ""
