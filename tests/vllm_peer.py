"""vLLM's Triton unified attention, out of its PyPI wheel, as a provider; the rest of vLLM is replaced by stand-ins.

    pip download --no-deps vllm==0.33.0
    PAGEBENCH_VLLM_WHEEL=vllm-0.33.0-*.whl python -m bench._traffic --provider tests/vllm_peer.py:VllmProvider

One query per sequence, as decode runs: 16 segments of the keys where the batch is small, as vLLM chooses.
"""

import enum
import importlib.util
import os
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from pagebench.kernels.triton_provider import TritonProvider
from pagebench.reference.dtypes import FLOAT32
from pagebench.reference.paged_attention import PagedAttention

WHEEL = "PAGEBENCH_VLLM_WHEEL"
FOLDER = "vllm/v1/attention/ops"
SEGMENTS = 16  # NUM_PAR_SOFTMAX_SEGMENTS of vLLM's Triton backend
PROGRAMS = 128  # MIN_LAUNCH_GRID_SIZE_2D: with fewer programs than this the keys are cut into segments


def missing() -> str | None:
    """Why the wheel cannot be used; None when it can."""
    path = os.environ.get(WHEEL, "")
    if not path:
        return f"the peer's wheel is absent: {WHEEL} is not set"
    return None if Path(path).is_file() else f"the peer's wheel is absent: {WHEEL}={path}"


def version() -> str:
    """As the wheel's file name says it."""
    return Path(os.environ[WHEEL]).name.split("-")[1]


class VllmProvider(TritonProvider):
    """Paged attention only; lse is not returned."""

    name = "vllm"

    def __init__(self) -> None:
        reason = missing()
        if reason is not None:
            raise ValueError(reason)
        self.folder = tempfile.TemporaryDirectory(prefix="pagebench-vllm-")
        self.kernels = _load(Path(os.environ[WHEEL]), Path(self.folder.name))

    def rejects(self, problem: Any) -> str | None:
        if not isinstance(problem, PagedAttention):
            return f"no kernel for {type(problem).__name__}"
        if problem.key_cache.dtype != problem.query.dtype:
            return "a quantised cache is not passed on by this adapter"
        if problem.num_seqs == 0 or np.diff(problem.query_start).max(initial=0) > 1:
            return "only decode steps are passed on by this adapter"
        features = [n for n in ("window", "soft_cap", "alibi_slopes", "sinks") if getattr(problem, n) is not None]
        return f"{features[0]} is not passed on by this adapter" if features else None

    def variants(self, problem: Any) -> list[dict[str, Any]]:
        return [{}]

    def paged_attention(self, problem: PagedAttention, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        query: Any = problem.query
        num_tokens, num_heads, head_size = query.shape
        scratch = (num_tokens, num_heads, SEGMENTS)
        dtype = np.dtype(str(query.dtype).removeprefix("torch.")) if query.dtype != torch.bfloat16 else None
        out = self.empty(tuple(query.shape), dtype) if dtype is not None else torch.empty_like(query)
        self.kernels.unified_attention(
            q=query,
            k=problem.key_cache,
            v=problem.value_cache,
            out=out,
            cu_seqlens_q=problem.query_start,
            max_seqlen_q=1,
            seqused_k=problem.seq_lens,
            max_seqlen_k=problem.block_table.shape[1] * problem.key_cache.shape[1],
            softmax_scale=float(problem.scale),
            causal=True,
            window_size=(-1, -1),
            block_table=problem.block_table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=PROGRAMS // problem.key_cache.shape[2],
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=self.empty((*scratch, triton.next_power_of_2(head_size)), FLOAT32),
            softmax_segm_max=self.empty(scratch, FLOAT32),
            softmax_segm_expsum=self.empty(scratch, FLOAT32),
        )
        return out, None


def _load(wheel: Path, folder: Path) -> types.ModuleType:
    """The module of the kernel; the stand-ins are `vllm` only while it is imported."""
    names = ("triton_attention_helpers", "triton_unified_attention")
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            archive.extract(f"{FOLDER}/{name}.py", folder)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    stand_ins = _stand_ins()
    sys.modules.update(stand_ins)
    try:
        modules = [_import(f"vllm.v1.attention.ops.{name}", folder / FOLDER / f"{name}.py") for name in names]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)
    return modules[-1]


def _import(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _stand_ins() -> dict[str, types.ModuleType]:
    logger = types.SimpleNamespace(debug_once=lambda *_: None)
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda _: False, is_rocm=lambda: False
    )
    modes = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda _: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": enum.IntEnum("KVQuantMode", modes, start=0)},
    }
    modules = {}
    for name, names in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(names, __path__=[])
    vars(modules["vllm"])["envs"] = modules["vllm.envs"]
    return modules
