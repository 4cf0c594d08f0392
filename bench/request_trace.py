"""Request traces: when requests arrived, how long their prompts were, how much was generated.

Read from CSV (TIMESTAMP, ContextTokens, GeneratedTokens: the Azure LLM inference format), from JSONL (timestamp in ms,
input_length, output_length and optionally hash_ids: the Mooncake format; or prompt_len, output_len as ShareGPT lengths
are written) and from ShareGPT's JSON of conversations. A seeded synthetic trace needs no file.
"""

import csv
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pagebench.reference.validation import require, require_int

HASHED_TOKENS = 512  # tokens that one of Mooncake's hash_ids stands for
CHARACTERS_PER_TOKEN = 4.0  # of ShareGPT's texts, whose tokens are not in the file


@dataclass(frozen=True, slots=True)
class Request:
    """One request. arrival in seconds from the trace's start; `prefix` names what its prompt begins with: pairs of
    (content id, tokens), equal between requests that have that content in common; the rest of it is its own."""

    arrival: float
    context_tokens: int
    generated_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()

    @property
    def total_tokens(self) -> int:
        """Slots that it holds when it ends, the last generated token's included."""
        return self.context_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; `note` says what was assumed, where the source does not say."""

    name: str
    requests: tuple[Request, ...]
    note: str = ""

    @property
    def has_content(self) -> bool:
        """Whether any two requests can be known to begin with the same tokens."""
        return any(request.prefix for request in self.requests)


def read_trace(path: str | Path, *, request_rate: float = 1.0, seed: int = 0, limit: int | None = None) -> Trace:
    """The trace in `path` (.csv, .jsonl or .json), its first `limit` requests.

    Where a file has no arrival times, they are drawn as a Poisson process of `request_rate` requests/s from `seed`.
    Raises ValueError naming the line for what cannot be read.
    """
    file = Path(path)
    require(request_rate > 0, "request_rate", "be positive", request_rate)
    if limit is not None:
        require_int("limit", limit, low=1)
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".json": _read_json}
    require(file.suffix in readers, "path", f"end in {', '.join(readers)}", str(path))
    require(file.is_file(), "path", "name a file", str(path))
    rows, note = readers[file.suffix](file)
    require(rows, "path", "name a trace of at least one request", str(path))
    return Trace(file.stem, _arranged(rows[:limit], request_rate, seed), note or _arrival_note(rows, request_rate))


Row = tuple[float | None, int, int, tuple[tuple[int, int], ...]]


def _arranged(rows: Iterable[Row], rate: float, seed: int) -> tuple[Request, ...]:
    """Requests from rows, in order of arrival, the first at 0; missing arrivals drawn."""
    rng, clock = random.Random(seed), 0.0
    requests = []
    for arrival, context, generated, prefix in rows:
        if arrival is None:
            clock += rng.expovariate(rate)
        requests.append(Request(clock if arrival is None else arrival, context, generated, prefix))
    start = min(request.arrival for request in requests)
    shifted = (Request(r.arrival - start, r.context_tokens, r.generated_tokens, r.prefix) for r in requests)
    return tuple(sorted(shifted, key=lambda request: request.arrival))


def _arrival_note(rows: list[Row], rate: float) -> str:
    drawn = any(row[0] is None for row in rows)
    return f"no arrival times in the file: Poisson, {rate:g} requests/s" if drawn else ""


def _read_csv(file: Path) -> tuple[list[Row], str]:
    with file.open(newline="", encoding="utf-8-sig") as handle:  # spreadsheets put a byte order mark first
        reader = csv.DictReader(handle)
        names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        require(not missing, "path", f"have the columns {', '.join(names)}", f"{file}: no {', '.join(missing)}")
        rows: list[Row] = []
        for line, row in enumerate(reader, 2):
            context = _count(file, line, "ContextTokens", row["ContextTokens"], low=0)
            generated = _count(file, line, "GeneratedTokens", row["GeneratedTokens"], low=0)
            rows.append((_seconds(file, line, row["TIMESTAMP"]), context, generated, ()))
    return rows, ""


def _seconds(file: Path, line: int, text: str | None) -> float:
    """A date and time of any number of decimals, or a plain number of seconds."""
    where = f"{file}, line {line}"
    require(isinstance(text, str) and text.strip(), "TIMESTAMP", "be given", where)
    assert text is not None
    try:
        value = float(text)
    except ValueError:
        try:
            whole, _, fraction = text.strip().replace("Z", "").partition(".")
            fraction, _, zone = fraction.partition("+")
            moment = datetime.fromisoformat(f"{whole}+{zone}" if zone else f"{whole}+00:00")
            value = moment.timestamp() + float(f"0.{fraction or 0}")
        except ValueError:
            raise ValueError(f"TIMESTAMP must be a date and time or seconds, got {text!r} ({where})") from None
    require(math.isfinite(value), "TIMESTAMP", "be finite", f"{text!r} ({where})")
    return value


def _count(file: Path, line: int, name: str, value: Any, *, low: int) -> int:
    try:
        number = int(value)
        whole = number == float(value) and number >= low and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        whole = False
    require(whole, name, f"be an integer >= {low}", f"{value!r} ({file}, line {line})")
    return int(value)


def _read_jsonl(file: Path) -> tuple[list[Row], str]:
    rows = []
    with file.open(encoding="utf-8-sig") as handle:
        for line, text in enumerate(handle, 1):
            if text.strip():
                try:
                    item = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"path must hold one JSON value a line, got {file}, line {line}: {error}"
                    ) from error
                rows.append(_json_row(file, line, item))
    return rows, ""


def _read_json(file: Path) -> tuple[list[Row], str]:
    try:
        items = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"path must hold JSON, got {file}: {error}") from error
    require(isinstance(items, list), "path", "hold a JSON list", str(file))
    texts = [item for item in items if isinstance(item, Mapping) and "conversations" in item]
    if not texts:
        return [_json_row(file, number, item) for number, item in enumerate(items, 1)], ""
    rows = [row for item in texts for row in _conversation(item["conversations"])]
    return rows, f"lengths estimated at {CHARACTERS_PER_TOKEN:g} characters a token; Poisson arrivals"


NAMES = {
    "context": ("ContextTokens", "input_length", "prompt_len", "prompt_tokens"),
    "generated": ("GeneratedTokens", "output_length", "output_len", "completion_tokens"),
}


def _json_row(file: Path, line: int, item: Any) -> Row:
    """An object with one of the known names for each length, or a list [prompt tokens, generated tokens]."""
    if isinstance(item, list) and len(item) == 2:
        return None, _count(file, line, "[0]", item[0], low=0), _count(file, line, "[1]", item[1], low=0), ()
    require(isinstance(item, Mapping), "path", "hold objects or pairs", f"{item!r} ({file}, line {line})")
    lengths = {}
    for wanted, names in NAMES.items():
        name = next((name for name in names if name in item), None)
        require(name is not None, "path", f"have one of {', '.join(names)}", f"{file}, line {line}")
        lengths[wanted] = _count(file, line, str(name), item[name], low=0)
    arrival = None
    if "timestamp" in item:
        arrival = _seconds(file, line, str(item["timestamp"])) / 1000  # milliseconds
    elif "TIMESTAMP" in item:
        arrival = _seconds(file, line, str(item["TIMESTAMP"]))
    hashes = item.get("hash_ids") or []
    ids = isinstance(hashes, list) and all(type(content) is int for content in hashes)
    require(ids, "hash_ids", "be a list of integers", f"{hashes!r} ({file}, line {line})")
    # The last id is of a partial block as a rule, so its tokens count only as far as the prompt goes.
    prefix = tuple(
        (content, min(HASHED_TOKENS, lengths["context"] - i * HASHED_TOKENS))
        for i, content in enumerate(hashes)
        if i * HASHED_TOKENS < lengths["context"]
    )
    return arrival, lengths["context"], lengths["generated"], prefix


def _conversation(turns: Any) -> list[Row]:
    """ShareGPT's use as a trace: the first human turn is the prompt, the answer to it what is generated."""
    if not isinstance(turns, list) or len(turns) < 2:
        return []
    texts = [turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2]]
    if not all(isinstance(text, str) and text for text in texts):
        return []
    prompt, answer = (max(1, round(len(str(text)) / CHARACTERS_PER_TOKEN)) for text in texts)
    return [(None, prompt, answer, ())]


def synthetic_trace(
    num_requests: int = 2000, *, request_rate: float = 4.0, num_prompts: int = 4, seed: int = 0
) -> Trace:
    """Made-up chat traffic: Poisson arrivals with a slow swell, log-normal lengths, shared system prompts.

    The lengths' medians and spreads are near those of public conversation traces. Three requests in four begin with one
    of `num_prompts` system prompts of 200 to 800 tokens. The same seed gives the same trace on every machine.
    """
    require_int("num_requests", num_requests, low=1)
    require_int("num_prompts", num_prompts, low=0)
    require(request_rate > 0, "request_rate", "be positive", request_rate)
    rng = random.Random(seed)
    prompts = [(index + 1, rng.randrange(200, 801)) for index in range(num_prompts)]
    clock, requests = 0.0, []
    for _ in range(num_requests):
        swell = 1 + 0.6 * math.sin(clock / 90)
        clock += rng.expovariate(request_rate * swell)
        own = min(6000, max(8, round(rng.lognormvariate(math.log(420), 1.0))))
        generated = min(1000, max(4, round(rng.lognormvariate(math.log(140), 0.8))))
        prefix = (rng.choice(prompts),) if prompts and rng.random() < 0.75 else ()
        requests.append(Request(clock, own + sum(tokens for _, tokens in prefix), generated, prefix))
    return Trace("synthetic", tuple(requests), f"made up, seed {seed}")
