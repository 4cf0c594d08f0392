"""Request traces and their replay: formats, accounting in closed form, and the public traces' figures."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import memory
from bench.memory_layouts import NaiveLayout, PagedLayout
from bench.memory_tables import parse_size, size
from bench.request_trace import Request, Trace, read_trace, synthetic_trace
from bench.trace_replay import Result, Server, replay
from pagebench.properties.claims import budget

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
needs_traces = pytest.mark.skipif(not DATA.is_dir(), reason="the request traces are not part of the project")


def trace_of(*requests: Any) -> Trace:
    return Trace("made up", tuple(Request(*request) for request in requests))


# -- reading


def test_azure_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:16:00,7,2"
    )
    first, second, third = read_trace(path).requests
    assert (first.arrival, first.context_tokens, first.generated_tokens) == (0, 374, 44)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)
    assert third.arrival == pytest.approx(13.31941, abs=1e-6)
    assert third.total_tokens == 9
    assert len(read_trace(path, limit=2).requests) == 2


def test_requests_are_replayed_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "shuffled.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n12.5,1,1\n10,2,1\n11,3,1\n")
    requests = read_trace(path).requests
    assert [(request.arrival, request.context_tokens) for request in requests] == [(0, 2), (1, 3), (2.5, 1)]


def test_mooncake_jsonl_shares_what_its_hashes_share(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    trace = read_trace(path)
    assert [request.arrival for request in trace.requests] == [0, 3]
    assert trace.requests[0].prefix == ((1, 512), (2, 512), (3, 76))
    result = replay(trace, PagedLayout(10_000, 16, share=True), Server(10_000))
    assert result.shared_tokens == 1024


def test_sharegpt_lengths_and_conversations(tmp_path: Path) -> None:
    lengths, texts = tmp_path / "lengths.json", tmp_path / "sharegpt.json"
    lengths.write_text(json.dumps([[10, 20], {"prompt_len": 30, "output_len": 40}]))
    trace = read_trace(lengths, request_rate=2.0, seed=1)
    assert [(r.context_tokens, r.generated_tokens) for r in trace.requests] == [(10, 20), (30, 40)]
    assert "Poisson, 2 requests/s" in trace.note
    assert trace == read_trace(lengths, request_rate=2.0, seed=1)
    assert trace != read_trace(lengths, request_rate=2.0, seed=2)
    turns = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 8}]
    texts.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]))
    trace = read_trace(texts)
    assert [(r.context_tokens, r.generated_tokens) for r in trace.requests] == [(10, 2)]
    assert "4 characters a token" in trace.note


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "spreadsheet.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,2,3\n", encoding="utf-8-sig")
    assert read_trace(file).requests[0].total_tokens == 5


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n", "path must have the columns .* no GeneratedTokens"),
        ("a.csv", HEAD, "path must name a trace of at least one request"),
        ("a.csv", HEAD + "1,2,3\n1,-2,3\n", r"ContextTokens must be an integer >= 0, got '-2 \(?.*line 3"),
        ("a.csv", HEAD + "1,2,x\n", "GeneratedTokens must be an integer >= 0"),
        ("a.csv", HEAD + "1,2\n", "GeneratedTokens must be an integer >= 0"),
        ("a.csv", HEAD + "noon,2,3\n", "TIMESTAMP must be a date and time or seconds, got 'noon'"),
        ("a.csv", HEAD + "nan,2,3\n", "TIMESTAMP must be finite"),
        ("a.csv", HEAD + ",2,3\n", "TIMESTAMP must be given"),
        ("a.jsonl", "{", "path must hold one JSON value a line, got .*line 1"),
        ("a.jsonl", '{"input_length": 3}', "path must have one of GeneratedTokens, output_length"),
        ("a.jsonl", '{"input_length": true, "output_length": 1}', "input_length must be an integer >= 0"),
        ("a.jsonl", '{"input_length": 3, "output_length": 1, "hash_ids": 5}', "hash_ids must be a list of integers"),
        ("a.jsonl", "3", "path must hold objects or pairs, got"),
        ("a.json", "{}", "path must hold a JSON list"),
        ("a.txt", "", r"path must end in .csv, .jsonl, .json, got"),
    ],
)
def test_bad_traces_are_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message.replace("'-2 ", "\"'-2' ")):
        read_trace(tmp_path / name)


def test_the_synthetic_trace_is_the_same_everywhere() -> None:
    trace = synthetic_trace()
    assert trace == synthetic_trace(seed=0)
    assert trace != synthetic_trace(seed=1)
    assert len(trace.requests) == 2000
    sums = [sum(getattr(r, name) for r in trace.requests) for name in ("context_tokens", "generated_tokens")]
    assert sums == [2_056_399, 386_977]
    assert all(a.arrival <= b.arrival for a, b in zip(trace.requests, trace.requests[1:], strict=False))


# -- replaying


def check_laws(trace: Trace, result: Result) -> None:
    """What holds for every replay."""
    assert result.finished + result.refused == len(trace.requests)
    assert result.used_at_end <= result.held_at_end
    assert result.used_steps <= result.reserved_steps
    assert result.peak_used <= result.peak_reserved <= result.server.num_slots
    assert result.peak_running <= len(trace.requests)


REQUESTS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(0, 60), st.integers(0, 30)).map(lambda parts: Request(*parts)),
    min_size=1,
    max_size=12,
)


@budget(60)
@given(requests=REQUESTS, block_size=st.sampled_from([1, 3, 16]))
def test_with_memory_to_spare_every_sum_is_known(requests: list[Request], block_size: int) -> None:
    """Nobody waits: each request is in memory from its arrival's step until its last token's."""
    trace = Trace("drawn", tuple(sorted(requests, key=lambda request: request.arrival)))
    server = Server(100_000, prefill_rate=100.0, step_time=0.25)
    result = replay(trace, PagedLayout(100_000, block_size, watermark=0), server)
    check_laws(trace, result)
    used = held = used_steps = running_steps = 0
    prefill_free = 0.0
    for request in trace.requests:
        start = -int(-request.arrival // 0.25)
        prefill_free = max(prefill_free, start * 0.25) + request.context_tokens / 100.0
        first = max(start, -int(-prefill_free // 0.25))
        total = request.total_tokens
        used, held = used + total, held + -(-total // block_size) * block_size
        # In memory with its whole prompt until the step of its first token, then a token more each step; it is gone
        # when the step of its last token ends.
        used_steps += request.context_tokens * (first - start)
        used_steps += sum(request.context_tokens + i for i in range(1, request.generated_tokens))
        running_steps += first - start + max(0, request.generated_tokens - 1)
    assert (result.used_at_end, result.held_at_end) == (used, held)
    assert (result.used_steps, result.running_steps) == (used_steps, running_steps)
    assert (result.refused, result.preempted, result.delayed_by_fragmentation) == (0, 0, 0)


@budget(60)
@given(
    requests=REQUESTS,
    slots=st.integers(16, 200),
    layout=st.sampled_from(["paged 1", "paged 4", "paged 16", "naive 64", "naive exact", "naive pow2"]),
)
def test_with_little_memory_everyone_still_ends(requests: list[Request], slots: int, layout: str) -> None:
    """Waiting, preemption and refusal lose nobody and nothing, and memory is never exceeded."""
    trace = Trace("drawn", tuple(sorted(requests, key=lambda request: request.arrival)))
    kind, _, rest = layout.partition(" ")
    made: Any = PagedLayout(slots, int(rest)) if kind == "paged" else None
    if made is None:
        made = NaiveLayout(slots, 64) if rest == "64" else NaiveLayout(slots, 1000, reserve=rest)  # type: ignore[arg-type]
    result = replay(trace, made, Server(slots, prefill_rate=100.0, step_time=0.25))
    check_laws(trace, result)
    lengths = [request.total_tokens for request in requests if made.can_ever_hold(request.total_tokens)]
    assert result.refused == len(requests) - len(lengths)
    assert result.used_at_end == sum(lengths)
    if kind == "paged":
        assert result.held_at_end == sum(-(-length // int(rest)) * int(rest) for length in lengths)
    else:
        assert result.preempted == 0


def test_preemption_takes_the_youngest_and_computes_it_again() -> None:
    trace = trace_of((0, 16, 40), (0, 16, 40))
    result = replay(trace, PagedLayout(64, 16, watermark=0), Server(64, prefill_rate=1e9, step_time=1.0))
    assert (result.finished, result.preempted) == (2, 1)
    # Both grow to 32; the older takes the third block and the younger gives its two up at its own 33rd token.
    assert result.prompt_tokens == 16 + 16 + 32
    assert result.peak_reserved == 64


def test_a_request_longer_than_the_reservation_or_the_memory_is_refused() -> None:
    trace = trace_of((0, 100, 1), (0, 10, 1))
    for layout in (NaiveLayout(200, 64), PagedLayout(64, 16)):
        result = replay(trace, layout, Server(200))
        assert (result.finished, result.refused) == (1, 1)


def test_waiting_for_one_piece_is_counted() -> None:
    """Two gaps of 40 slots each: a request of 60 waits although 80 are free."""
    trace = trace_of((0, 39, 1), (0, 39, 99), (0, 39, 1), (0, 1, 99), (5, 59, 1))
    result = replay(trace, NaiveLayout(318, 1000, reserve="exact"), Server(318, prefill_rate=1e9, step_time=1.0))
    assert result.delayed_by_fragmentation == 1
    assert result.external_steps > 0
    paged = replay(trace, PagedLayout(318, 1, watermark=0), Server(318, prefill_rate=1e9, step_time=1.0))
    assert (paged.delayed_by_fragmentation, paged.external_steps) == (0, 0)


def test_a_shared_prompt_is_in_memory_once() -> None:
    system = ((7, 64),)
    trace = trace_of((0, 80, 10, system), (0, 80, 10, system), (0, 80, 10))
    server = Server(4096, prefill_rate=1e9, step_time=1.0)
    shared = replay(trace, PagedLayout(4096, 16, share=True), server)
    alone = replay(trace, PagedLayout(4096, 16), server)
    assert (shared.shared_tokens, shared.peak_shared) == (64, 4)
    assert alone.peak_used - shared.peak_used == 64
    assert alone.used_at_end == shared.used_at_end, "per request nothing changes"


def test_a_prompt_that_must_wait_leaves_nothing_to_be_found() -> None:
    """What was never computed must not be counted as shared when the request is let in at last."""
    trace = trace_of((0, 32, 40), (0, 128, 1, ((7, 128),)))
    server = Server(192, prefill_rate=1e9, step_time=1.0)
    result = replay(trace, PagedLayout(192, 16, share=True, watermark=0.3), server)
    assert result.waited == 41, "the second waits until the first has ended"
    assert (result.finished, result.shared_tokens) == (2, 0)


def test_samples_follow_the_clock() -> None:
    trace = trace_of((0, 10, 100), (50, 10, 10))
    result = replay(trace, PagedLayout(1000, 16), Server(1000, step_time=0.5), sample_every=10.0)
    assert [sample.time for sample in result.samples] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


def test_most_requests_at_once_can_be_limited() -> None:
    trace = trace_of(*((0, 10, 10) for _ in range(8)))
    result = replay(trace, PagedLayout(1000, 16), Server(1000, max_running=3))
    assert (result.peak_running, result.finished) == (3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": 0}, "num_slots must be an integer >= 1"),
        ({"num_slots": 1, "prefill_rate": 0}, "prefill_rate must be positive"),
        ({"num_slots": 1, "step_time": -1}, "step_time must be positive"),
        ({"num_slots": 1, "step_time": math.inf}, "step_time must be positive and finite"),
        ({"num_slots": 1, "max_running": 0}, "max_running must be an integer >= 1"),
    ],
)
def test_bad_servers_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(**arguments)


# -- the public traces

SLOTS = 62_594  # Llama-2-13B in FP16 on 80 GiB


@needs_traces
def test_azure_conversations_in_blocks_and_reservations() -> None:
    trace = read_trace(DATA / "azure_llm_2023_conv.csv")
    assert len(trace.requests) == 19_366
    start = time.process_time()
    paged = replay(trace, PagedLayout(SLOTS, 16), Server(SLOTS))
    naive = replay(trace, NaiveLayout(SLOTS, 8192), Server(SLOTS))
    seconds = time.process_time() - start
    assert f"{paged.useful_share:.3%}" == "99.456%"
    assert f"{paged.mean_waste:.4f}" == "7.4676"
    assert (paged.finished, paged.refused) == (19_366, 0)
    assert f"{naive.useful_share:.3%}" == "16.665%"
    assert (naive.finished, naive.refused) == (19_365, 1)
    assert naive.mean(naive.running_steps) * 4 < paged.mean(paged.running_steps)
    assert seconds < 30, f"the two replays took {seconds:.1f} s"


@needs_traces
def test_azure_conversations_in_blocks_of_128() -> None:
    trace = read_trace(DATA / "azure_llm_2023_conv.csv")
    result = replay(trace, PagedLayout(SLOTS, 128), Server(SLOTS))
    assert f"{result.useful_share:.3%}" == "95.624%"


@needs_traces
def test_azure_code() -> None:
    trace = read_trace(DATA / "azure_llm_2023_code.csv")
    assert len(trace.requests) == 8819
    result = replay(trace, PagedLayout(SLOTS, 16), Server(SLOTS))
    assert f"{result.useful_share:.3%}" == "99.633%"


# -- the command


def test_the_command_prints_tables_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama-2-13b", "--gpu-memory", "80GiB", "--limit", "60", "--figures", str(tmp_path)]
    options += ["--max-len", "2048", "--block-size", "16", "--json", str(tmp_path / "found.json"), "--fragmentation"]
    assert memory.main(options) == 0
    printed = capsys.readouterr().out
    assert "3,355,443,200" in printed
    assert "prefill 20000 tokens/s, decode step 0.025 s" in printed
    for layout in ("naive 2048", "naive exact (best fit)", "naive pow2 (first fit)", "paged 16", "paged 16 shared"):
        assert f"\n{layout}  " in printed
    assert "100     1948               7       12" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "found.json",
        "memory_over_time.png",
        "memory_over_time.svg",
        "tokens_per_second.png",
        "tokens_per_second.svg",
    ]
    assert {found["layout"] for found in json.loads((tmp_path / "found.json").read_text())} >= {"paged 16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no-such-model"], "model must be a config.json or one of llama-2-7b"),
        (["--gpu-memory", "80 apples"], "size must be a positive number with B, KB, MB"),
        (["--block-size", "0"], "block_size must be an integer >= 1, got 0"),
        (["--gpu-memory", "8GiB"], "gpu_memory must hold 24.24 GiB of weights and a token in 90% of it, got '8 GiB'"),
        (["--trace", "no-such-file.csv"], "path must name a file"),
        (["--step-time", "0"], "step_time must be positive"),
        (["--utilization", "2"], r"utilization must be in \(0, 1\]"),
        (["--block-size", "0"], "block_size must be an integer >= 1"),
        (["--max-len", "0"], "max_len must be an integer >= 1"),
        (["--limit", "0"], "num_requests must be an integer >= 1"),
    ],
)
def test_bad_options_are_usage_errors(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        memory.main([*options, "--no-figures"])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "expected"), [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("512MiB", 512 << 20), ("1e9", 10**9)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "nan", "1XB", "inf GiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size must be a positive number"):
        parse_size(text)


def test_sizes_for_readers() -> None:
    assert [size(value) for value in (512, 819_200, 3_355_443_200)] == ["512 B", "800 KiB", "3.125 GiB"]
