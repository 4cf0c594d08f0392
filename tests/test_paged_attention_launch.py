"""How paged attention would fill a GPU: programs and bytes on their way for each SM, from launches as compiled."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import _codegen
from bench._launch import CompiledLaunch

ROOT = Path(__file__).resolve().parent.parent
SMS = 132  # of an H200, whose memory wants BYTES_IN_FLIGHT on the way to each of them
BYTES_IN_FLIGHT = 25 * 1024
DECODES = ("llama-3-8b-decode-b8-s4096-block16-fp16", "llama-3-8b-decode-b1-s32768-block16-fp16")

COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\s+\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-fA-F]+|\d+)")
WAIT = re.compile(r"cp\.async\.wait_group\s+(\d+)")
LABEL, BRANCH = re.compile(r"^\s*(\$\w+):"), re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")


def loops(ptx: str) -> Iterator[list[str]]:
    """The lines from a label to each branch back to it, the shortest first."""
    lines = ptx.splitlines()
    at = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    back = [(at[found[1]], i) for i, line in enumerate(lines) if (found := BRANCH.search(line)) and found[1] in at]
    for first, last in sorted(((a, b) for a, b in back if a <= b), key=lambda pair: pair[1] - pair[0]):
        yield lines[first : last + 1]


def bytes_in_flight(ptx: str, threads: int) -> int:
    """Bytes of K and V on their way to a program while it computes: copied by its main loop and not waited for yet.

    The main loop is the smallest that copies 16 bytes at a time and waits for groups of copies. Copies of fewer bytes
    are of block ids.
    """
    for loop in loops(ptx):
        if any(WAIT.search(line) for line in loop) and any(COPY.search(line) for line in loop):
            return _in_steady_state(loop, threads)
    return 0


def _in_steady_state(loop: list[str], threads: int) -> int:
    groups, open_group, most = [0] * 16, 0, 0
    for line in loop * 8:
        if copy := COPY.search(line):
            size = int(copy[1], 0)
            open_group += size * threads if size == 16 else 0
        elif "cp.async.commit_group" in line:
            groups, open_group = [*groups, open_group], 0
        elif wait := WAIT.search(line):
            most = sum(groups) + open_group  # before the wait: what the loop computed beside
            groups = groups[len(groups) - int(wait[1]) :]
    return most


def recorded(provider: str, workload: str) -> CompiledLaunch:
    """The launch that reads K and V, for sm_90."""
    recording = _codegen.record(provider, DECODES, 90)[workload]
    assert recording.launches, recording
    return recording.launches[0]


@pytest.mark.parametrize("provider", ["triton", "cupy"])
@pytest.mark.parametrize("workload", DECODES)
def test_decode_fills_a_gpu(provider: str, workload: str) -> None:
    """Two programs and more for each SM, which has room for them, and 25 KB of K and V on their way to it."""
    launch = recorded(provider, workload)
    assert launch.programs >= 2 * SMS
    assert launch.programs_per_sm >= 2
    resident = min(launch.programs_per_sm, launch.programs // SMS)
    per_program = bytes_in_flight(launch.ptx, launch.threads)
    assert per_program == 32 * 1024, "two tiles of K and V of Triton's, one of CUDA's"
    assert resident * per_program >= BYTES_IN_FLIGHT
    assert launch.stats.spills == 0
    assert max(launch.stats.async_copies) == 128


def test_heads_that_are_taken_in_parts_fit_an_sm() -> None:
    """Large groups of heads of more than 256 elements, whose queries are loaded again and again, in Triton."""
    options = ["--provider", "triton", "--arch", "90", "--head-size", "576", "--work", "decode-g128"]
    command = [sys.executable, "-m", "bench.paged_attention_codegen", *options, "--type", "fp16", "--type", "fp32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    launches = [line for line in done.stdout.splitlines() if "programs/SM" in line]
    assert sum("attend_kernel" in line for line in launches) == 2, done.stderr
    assert not [line for line in launches if "no program fits" in line or " 0 programs/SM" in line]


LOOP = """
$L__1:
 cp.async.wait_group {pending};
 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
 cp.async.commit_group;
 @%p1 cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;
 cp.async.commit_group;
 @%p1 bra \t$L__1;
"""


@pytest.mark.parametrize(("pending", "copies"), [(0, 1), (1, 1), (2, 2), (4, 3)])
def test_copies_on_their_way_are_counted(pending: int, copies: int) -> None:
    """Groups that the wait leaves pending, and those that come after it; block ids do not count."""
    assert bytes_in_flight(LOOP.format(pending=pending), 128) == copies * 16 * 128


def test_no_pipeline_has_nothing_on_its_way() -> None:
    assert bytes_in_flight(LOOP.replace("cp.async", "ld").format(pending=0), 128) == 0
    assert bytes_in_flight(LOOP.replace("bra", "bar").format(pending=0), 128) == 0
