"""Replay a request trace against an allocator, token by token, and account for every slot.

A server is simulated that holds `num_slots` token slots. Requests wait in one line; the first is let in when its memory
is there, and holds it while its prompt is computed (one prompt after another, `prefill_rate` tokens/s). From then on
every decode step of `step_time` seconds gives each running request one token. When no block is left, the request let in
last gives its memory up and is computed again later (preemption). A trace says nothing about service times: the two
rates are parameters, and belong to every result.

Nothing is estimated: each admission, each token and each end is a call of the allocator itself.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.memory_layouts import Layout
from bench.request_trace import Request, Trace
from pagebench.reference.validation import require, require_int

Progress = Callable[[int], None]  # called with the number of requests that ended or were refused since the last call


@dataclass(frozen=True, slots=True)
class Server:
    """What a trace does not say. max_running: requests decoded at once, None for as many as memory holds."""

    num_slots: int
    prefill_rate: float = 20000.0  # prompt tokens per second
    step_time: float = 0.025  # seconds per decode step, whatever the batch
    max_running: int | None = None

    def __post_init__(self) -> None:
        require_int("num_slots", self.num_slots, low=1)
        require(self.prefill_rate > 0, "prefill_rate", "be positive", self.prefill_rate)
        require(0 < self.step_time < math.inf, "step_time", "be positive and finite", self.step_time)
        if self.max_running is not None:
            require_int("max_running", self.max_running, low=1)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment. Slots, and numbers of requests."""

    time: float
    used: int
    reserved: int
    running: int
    waiting: int


@dataclass(slots=True)
class Result:
    """What a replay found. Slot integrals are slots x steps; divide by `steps` for the mean over the time replayed."""

    layout: str
    server: Server
    requests: int
    finished: int = 0
    refused: int = 0  # longer than the layout or the memory can ever hold
    preempted: int = 0  # times that a request gave its memory up
    delayed_by_fragmentation: int = 0  # requests that waited although the free total would have held them
    used_at_end: int = 0  # over finished requests: slots written
    held_at_end: int = 0  # and slots held
    steps: int = 0
    used_steps: int = 0
    reserved_steps: int = 0
    running_steps: int = 0
    external_steps: int = 0  # free slots while the first in line needs fewer, but in one piece
    peak_running: int = 0
    peak_used: int = 0
    peak_reserved: int = 0
    peak_shared: int = 0  # blocks
    prompt_tokens: int = 0  # admitted, recomputed ones included
    shared_tokens: int = 0  # of them, found in shared blocks
    waited: float = 0.0  # seconds from arrival to first admission, over admitted requests
    admitted: int = 0
    samples: list[Sample] = field(default_factory=list)

    @property
    def useful_share(self) -> float:
        """Slots written over slots held, at the end of every finished request."""
        return self.used_at_end / self.held_at_end if self.held_at_end else 1.0

    @property
    def mean_waste(self) -> float:
        """Slots held and not written per finished request at its end."""
        return (self.held_at_end - self.used_at_end) / self.finished if self.finished else 0.0

    @property
    def seconds(self) -> float:
        """Length of the replay in event time."""
        return self.steps * self.server.step_time

    def mean(self, integral: int) -> float:
        """Mean over time of what was summed up step by step."""
        return integral / self.steps if self.steps else 0.0


@dataclass(slots=True)
class _Live:
    """A request from its first arrival to its end."""

    request: Request
    seq_id: int
    context: int  # tokens to compute when admitted: the prompt, after a preemption also what was generated
    ready: float = 0.0  # when its prompt is computed
    last_step: int = -1  # step at which its last token comes, while it is running
    joined: int = -1
    admitted: bool = False
    delayed: bool = False


class Replay:
    """One trace on one layout. `run` does it all; a replay is used once."""

    def __init__(self, trace: Trace, layout: Layout, server: Server, *, sample_every: float = 5.0) -> None:
        require(sample_every > 0, "sample_every", "be positive", sample_every)
        self.layout = layout
        self.server = server
        self.result = Result(layout.name, server, len(trace.requests))
        self.sample_steps = max(1, round(sample_every / server.step_time))
        self.arrivals = deque(
            _Live(request, seq_id, request.context_tokens) for seq_id, request in enumerate(trace.requests)
        )
        self.waiting: deque[_Live] = deque()
        self.prefilling: deque[_Live] = deque()
        self.running: dict[int, _Live] = {}  # in order of admission
        self.ending: dict[int, list[_Live]] = defaultdict(list)  # by step
        self.step = 0
        self.used = 0  # slots written by all admitted requests, shared ones counted for each
        self.prefill_free = 0.0  # when the prompt in work is done
        self.blocked = False  # the first in line found no room, and nothing was freed since
        self.external = 0

    def run(self, progress: Progress = lambda ended: None) -> Result:
        """Replay until every request has ended or was refused."""
        result, reported = self.result, 0
        while self.arrivals or self.waiting or self.prefilling or self.running:
            self._arrive()
            self._admit()
            self._join()
            self._decode()
            self._account(self._steps_to_skip())
            ended = result.finished + result.refused
            if ended > reported:
                progress(ended - reported)
                reported = ended
        assert self.used == 0, "slots are still counted as used"
        assert self.layout.reserved == 0, "the layout still holds memory"
        return result

    @property
    def now(self) -> float:
        return self.step * self.server.step_time

    def _arrive(self) -> None:
        """Everyone who has come by now joins the line, or is refused for good."""
        while self.arrivals and self.arrivals[0].request.arrival <= self.now:
            live = self.arrivals.popleft()
            if self.layout.can_ever_hold(live.request.total_tokens):
                self.waiting.append(live)
            else:
                self.result.refused += 1

    def _admit(self) -> None:
        """Let in the first in line as long as there is memory."""
        limit = self.server.max_running
        while self.waiting and not self.blocked:
            live = self.waiting[0]
            alone = not self.running and not self.prefilling
            if limit is not None and len(self.running) + len(self.prefilling) >= limit:
                return
            shared = self.layout.admit(live.seq_id, live.request, live.context, alone=alone)
            if shared is None:
                self.blocked = True
                self.external = self.layout.unusable(live.request)
                if self.external and not live.delayed:
                    live.delayed = True
                    self.result.delayed_by_fragmentation += 1
                return
            self.waiting.popleft()
            self._admitted(live, shared)

    def _admitted(self, live: _Live, shared: int) -> None:
        result = self.result
        if not live.admitted:
            live.admitted = True
            result.admitted += 1
            result.waited += self.now - live.request.arrival
        result.prompt_tokens += live.context
        result.shared_tokens += shared
        self.used += live.context
        self.prefill_free = max(self.prefill_free, self.now) + (live.context - shared) / self.server.prefill_rate
        live.ready = self.prefill_free
        self.prefilling.append(live)

    def _join(self) -> None:
        """Those whose prompt is computed start to generate; one that generates nothing ends."""
        while self.prefilling and self.prefilling[0].ready <= self.now:
            live = self.prefilling.popleft()
            left = live.request.total_tokens - live.context
            if left == 0:
                self._end(live, live.context)
                continue
            live.joined, live.last_step = self.step, self.step + left - 1
            self.running[live.seq_id] = live
            self.ending[live.last_step].append(live)

    def _decode(self) -> None:
        """One token for every running request, oldest first; then the ends."""
        done = self.layout.append_each(self.running)
        self.used += done
        if done < len(self.running):
            self._decode_short(list(self.running)[done:])
        for live in self.ending.pop(self.step, ()):
            if live.last_step == self.step:  # else it was preempted meanwhile
                del self.running[live.seq_id]
                self._end(live, live.request.total_tokens)

    def _decode_short(self, rest: list[int]) -> None:
        """The rest of a step in which memory ran out: whoever came last gives up its own until there is enough."""
        for seq_id in rest:
            while seq_id in self.running and not self.layout.append_each((seq_id,)):
                self._preempt(self.prefilling[-1] if self.prefilling else self.running[next(reversed(self.running))])
            self.used += seq_id in self.running

    def _preempt(self, live: _Live) -> None:
        """Back to the head of the line; what it had generated becomes part of its prompt."""
        written = self.layout.length(live.seq_id)
        self.used -= written
        self.layout.release(live.seq_id)
        if live.seq_id in self.running:
            del self.running[live.seq_id]
        else:
            self.prefilling.remove(live)
        live.context, live.last_step = written, -1
        self.waiting.appendleft(live)
        self.blocked = False
        self.result.preempted += 1

    def _end(self, live: _Live, written: int) -> None:
        self.result.finished += 1
        self.result.used_at_end += written
        self.result.held_at_end += self.layout.held(live.seq_id)
        self.used -= written
        self.layout.release(live.seq_id)
        self.blocked = False

    def _steps_to_skip(self) -> int:
        """How many steps from here to the next at which anything happens: 1 while someone is generating."""
        if self.running:
            return 1
        moments = [self.arrivals[0].request.arrival] if self.arrivals else []
        moments += [self.prefilling[0].ready] if self.prefilling else []
        if not moments or (self.waiting and not self.blocked):
            return 1
        return max(1, -int(-min(moments) // self.server.step_time) - self.step)

    def _account(self, steps: int) -> None:
        """Add what holds during the next `steps` steps to the integrals, and go there."""
        result, layout = self.result, self.layout
        running = len(self.running) + len(self.prefilling)
        reserved = layout.reserved
        used = self.used - layout.shared_slots
        result.steps += steps
        result.used_steps += used * steps
        result.reserved_steps += reserved * steps
        result.running_steps += running * steps
        if self.blocked:
            result.external_steps += self.external * steps
        result.peak_running = max(result.peak_running, running)
        result.peak_used = max(result.peak_used, used)
        result.peak_reserved = max(result.peak_reserved, reserved)
        result.peak_shared = max(result.peak_shared, layout.shared_blocks)
        for step in self._sampled(steps):
            sample = Sample(step * self.server.step_time, used, reserved, running, len(self.waiting))
            result.samples.append(sample)
        self.step += steps

    def _sampled(self, steps: int) -> Iterator[int]:
        """The sampled steps among the next `steps`."""
        first = -(-self.step // self.sample_steps) * self.sample_steps
        return iter(range(first, self.step + steps, self.sample_steps))


def replay(
    trace: Trace, layout: Layout, server: Server, progress: Progress = lambda ended: None, *, sample_every: float = 5.0
) -> Result:
    """Replay `trace` on a fresh `layout`; sample the server every `sample_every` seconds of event time."""
    return Replay(trace, layout, server, sample_every=sample_every).run(progress)
