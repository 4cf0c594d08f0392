"""When the table as a whole is good: what `nox -s bench` exits with."""

import dataclasses

import pytest

from bench._codegen import Recording
from bench._measure import Verdict
from bench._traffic import Traffic
from bench.run import QUICK, Row, failed
from bench.workloads import WORKLOADS

PASSED = Row("triton", WORKLOADS[QUICK[0]], Verdict("passed", "interpreter"), None, None, None)
REJECTED = Verdict("rejected", "-", detail="only copies")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REQUIRE_GPU", raising=False)


def test_a_quick_run_has_one_workload_of_each_op() -> None:
    assert sorted(WORKLOADS[name].op for name in QUICK) == sorted({workload.op for workload in WORKLOADS.values()})


def test_what_a_peer_rejects_is_no_failure() -> None:
    assert failed([PASSED]) == []
    peer = dataclasses.replace(PASSED, provider="peer.py:Peer")
    assert failed([PASSED, peer, dataclasses.replace(peer, verdict=REJECTED)]) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (dataclasses.replace(PASSED, verdict=Verdict("failed", "host", detail="wrong bytes")), "wrong bytes"),
        (dataclasses.replace(PASSED, verdict=REJECTED), "ours reject nothing: only copies"),
        (dataclasses.replace(PASSED, codegen=Recording(error="no ptxas")), "code generation failed: no ptxas"),
        (dataclasses.replace(PASSED, traffic=Traffic(error="a race")), "tracing failed: a race"),
        (dataclasses.replace(PASSED, provider="mine.py:M", verdict=REJECTED), "mine.py:M ran nothing: only copies"),
    ],
)
def test_each_way_to_fail_is_named(row: Row, said: str) -> None:
    (reason,) = failed([PASSED, row])
    assert said in reason
    assert reason.startswith(row.provider)


def test_nothing_passed_and_nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(PASSED, verdict=Verdict("unavailable", "-", detail="no triton"))
    assert "nothing ran: no provider accepted any workload" in failed([missing])
    monkeypatch.setenv("REQUIRE_GPU", "1")
    assert failed([PASSED]) == ["REQUIRE_GPU=1, but nothing was timed on a GPU"]
