"""Which accesses race: the C++ recorder against a model that keeps every access and a vector clock per thread."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from trace_samples import Samples, enumerators

from pagebench.kernels import cuda_host
from pagebench.kernels.cuda_host import threads_in_reverse
from pagebench.kernels.memory_trace import RaceError, trace

BLOCKS, THREADS, PLACES = 2, 64, 4
OPERATIONS = enumerators("Operation")
OP = {name: i for i, name in enumerate(OPERATIONS)}
ACCESSES = [name for name in OPERATIONS if name.endswith(("Shared", "Global"))]


@dataclass(frozen=True, slots=True)
class Done:
    """One access: by whom, what (of ACCESSES), where, when by its clock, and what it came after."""

    block: int
    thread: int
    what: str
    place: int
    time: int
    after: tuple[int, ...]

    def conflicts(self, other: "Done") -> bool:
        same = self.what[-6:] == other.what[-6:] and self.place == other.place
        if not same or (self.block != other.block and self.what.endswith("Shared")):
            return False
        kinds = {self.what[1:-6], other.what[1:-6]}
        return "Store" in kinds or kinds == {"Load", "Atomic"}

    def ordered(self, other: "Done") -> bool:
        if self.block != other.block:
            return False
        return other.after[self.thread] >= self.time or self.after[other.thread] >= other.time


def random_script(rng: np.random.Generator, halves: bool) -> np.ndarray:
    """int32 [steps, BLOCKS, THREADS]: a few accesses a step, or a synchronisation of every thread."""
    steps = []
    syncs = ["kBarrier", "kSyncWarp", "kSyncHalf"] if halves else ["kBarrier", "kSyncWarp"]
    for _ in range(int(rng.integers(2, 9))):
        step = np.zeros((BLOCKS, THREADS), np.int32)
        if rng.random() < 0.45:
            step[:] = OP[syncs[rng.integers(len(syncs))]]
        else:
            threads = rng.choice([0, 1, 17, 31, 32, 63], int(rng.integers(1, 4)), replace=False)
            what = ACCESSES[rng.integers(len(ACCESSES))] if rng.random() < 0.6 else None
            for thread in threads:
                name = what or ACCESSES[rng.integers(len(ACCESSES))]
                block = rng.integers(BLOCKS) if rng.random() < 0.9 else slice(None)
                step[block, thread] = OP[name] + 16 * rng.integers(PLACES // 2)
        steps.append(step)
    return np.stack(steps)


def accesses(script: np.ndarray) -> list[Done]:
    """Every access of the script with its clock."""
    done = []
    for block in range(BLOCKS):
        clocks = np.zeros((THREADS, THREADS), np.int64)  # clocks[t][u]: how much of u's past t comes after
        np.fill_diagonal(clocks, 1)
        for step in script[:, block]:
            for size, name in ((THREADS, "kBarrier"), (32, "kSyncWarp"), (16, "kSyncHalf")):
                if step[0] == OP[name]:
                    for first in range(0, THREADS, size):
                        clocks[first : first + size] = clocks[first : first + size].max(axis=0)
                    clocks[np.arange(THREADS), np.arange(THREADS)] += 1
                    break
            else:
                for thread in np.flatnonzero(step):
                    name = OPERATIONS[step[thread] % 16]
                    after = tuple(clocks[thread].tolist())
                    done.append(Done(block, int(thread), name, int(step[thread] // 16), after[thread], after))
    return done


def races(script: np.ndarray) -> list[tuple[Done, Done]]:
    pairs = combinations(accesses(script), 2)
    return [
        (a, b) for a, b in pairs if a.conflicts(b) and (a.block, a.thread) != (b.block, b.thread) and not a.ordered(b)
    ]


@pytest.fixture(scope="module")
def samples() -> Samples:
    reason = cuda_host.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return Samples()


def found(samples: Samples, script: np.ndarray) -> RaceError | None:
    memory, out = np.zeros(PLACES, np.int32), np.zeros(BLOCKS * THREADS, np.int32)
    try:
        with trace(samples.provider, uninitialised=False):
            samples.launch("script", BLOCKS, THREADS, script, np.int32(len(script)), memory, out)
    except RaceError as error:
        return error
    return None


def same(race: tuple[Done, Done], error: RaceError) -> bool:
    """Whether the error names this race."""
    named = {(a.program[0], (a.thread or (0,))[0], a.kind) for a in (error.first, error.second)}
    name = {"Shared": "__shared__ box", "Global": "memory"}[race[0].what[-6:]]
    meant = {(d.block, d.thread, d.what[1:-6].lower()) for d in race}
    return named == meant and (error.buffer, error.index) == (name, race[0].place)


@pytest.mark.parametrize("halves", [False, True])
def test_races_of_random_scripts(samples: Samples, halves: bool) -> None:
    rng = np.random.default_rng(0)
    racy = 0
    for number in range(400):
        script = random_script(rng, halves)
        expected = races(script)
        racy += bool(expected)
        if number % 2:
            error = found(samples, script)
        else:
            with threads_in_reverse():
                error = found(samples, script)
        if error is None:
            assert not expected, f"missed: {expected[0]}"
        else:
            assert any(same(race, error) for race in expected), f"{error}, but expected {expected[:3]}"
    assert 100 < racy < 300
