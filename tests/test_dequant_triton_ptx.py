"""What the Triton dequantisation compiles to: no operation that a rounding contract forbids, whole words, no spill."""

import re

from bench import _codegen

NAMES = ("llama-3-8b-nf4-nested-gate-fp16", "llama-3-8b-nvfp4-ct-gate-fp16", "llama-3-8b-gemv-mxfp4-gate-m1-fp16")
FORBIDDEN = re.compile(r"\b(div\.(full|approx)|rcp\.approx)|\.ftz\b")


def test_rounding_width_and_spills() -> None:
    nested, divided, fused = (recording.launches[0] for recording in _codegen.record("triton", NAMES, 90).values())
    for launch in (nested, divided, fused):
        assert not FORBIDDEN.search(launch.ptx), launch.kernel
        assert launch.stats.spills == 0
    assert not re.search(r"\bfma\.", nested.ptx)  # code2 * absmax2 + offset rounds twice
    assert "div.rn.f32" in divided.ptx
    for launch in (nested, divided):
        assert launch.stats.global_loads[128] >= 1
        assert set(launch.stats.global_stores) == {128}
    assert fused.stats.async_copies.get(128, 0) >= 1  # the next tiles are on their way
