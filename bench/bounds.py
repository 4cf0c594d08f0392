"""How near a provider's results come to the error bound: the largest error / bound over thousands of drawn problems.

    python -m bench.bounds --provider triton --problems 2000

A cell is a dtype, a decade of visible keys (of a row: a query that sees fewer keys counts where it belongs) and a
feature; for merge_states a dtype and a distance of the two lses. A ratio above 1 is a wrong result, or a bound that is
none; one below 0.02 says that the bound is too wide to see much.

Results go to results/bounds.json after every few problems, and a later call goes on behind the last one stored. It
starts afresh where the kernels, the bound, the drawing or a package have changed since. `--index N` runs one problem
again.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from bench._table import table
from bench.bounds_problems import Drawn, attention, decade_of, merging
from pagebench.kernels.providers import load_provider
from pagebench.properties import probes
from pagebench.reference import error_bounds, merge_states, paged_attention
from pagebench.reference.dtypes import Array

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "results" / "bounds.json"
OURS = ("triton", "cupy")
PROBLEMS = 2000
FLUSH_EVERY = 5
LEAST, MOST = 0.02, 1.0
OPS = {"paged_attention": attention, "merge_states": merging}
PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "cupy-cuda13x")

Cells = dict[str, dict[str, Any]]


def ratios(provider: Any, op: str, drawn: Drawn) -> dict[str, tuple[Array, Array]]:
    """(largest |error| / bound of out, of lse) by cell's last part, arrays over the rows that belong there.

    Rows that see nothing have no bound and are left out.
    """
    problem: Any = drawn.problem
    got = [provider.to_host(x) for x in getattr(provider, op)(problem.on(provider), **drawn.variant)]
    provider.synchronize()
    if op == "paged_attention":
        expected, bounds = paged_attention.paged_attention(problem), error_bounds.paged_attention(problem)
        keys = probes.visible_count(problem)
        names = [f"{decade_of(n)} keys, {drawn.feature}" if n else "" for n in keys.tolist()]
    else:
        expected, bounds = merge_states.merge_states(problem), merge_states.bound(problem)
        names = [drawn.feature] * problem.num_tokens
    out, lse = (
        error_bounds.error_over_bound(np.asarray(g).astype(np.float64), e, b).reshape(len(names), -1).max(axis=1)
        for g, e, b in zip(got, expected, bounds, strict=True)
    )
    rows = {name: np.array([own == name for own in names]) for name in names if name}
    return {name: (out[own], lse[own]) for name, own in rows.items()}


def measure(provider: Any, op: str, seed: int, index: int, cells: Cells) -> dict[str, Any]:
    """Run one problem, unless the provider rejects it, and enter it into `cells`; returns its description."""
    drawn = OPS[op](seed, index, provider)
    reason = provider.rejects(drawn.problem)
    if reason is not None:
        return {"index": index, "rejected": reason}
    dtype = (drawn.problem.query if op == "paged_attention" else drawn.problem.out_a).dtype.name  # type: ignore[attr-defined]  # of that op
    said: dict[str, Any] = {"index": index, "numbers": drawn.numbers, "variant": drawn.variant}
    for name, (out, lse) in ratios(provider, op, drawn).items():
        cell = cells.setdefault(f"{dtype}, {name}", {"problems": 0, "out": 0.0, "lse": 0.0, "worst": {}})
        cell["problems"] += 1
        here = {"out": float(out.max()), "lse": float(lse.max())}
        if max(here.values()) > max(cell["out"], cell["lse"]):
            cell["worst"] = said
        for result, ratio in here.items():
            cell[result] = max(cell[result], round(ratio, 6))
    return said


def sources() -> str:
    """Changes with the kernels, the references, the bound and the drawing; not with comments and docstrings."""
    patterns = ("kernels/paged_attention*", "kernels/merge_states*", "reference/paged_attention.py")
    patterns += ("reference/merge_states.py", "reference/error_bounds.py", "bench/bounds_problems.py")
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        text = path.read_text()
        digest.update(f"{path.name}\0{_code(text) if path.suffix == '.py' else text}\0".encode())
    return digest.hexdigest()[:16]


def _code(text: str) -> str:
    """What Python makes of a source, without its docstrings: the same for any layout and comment."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def load(path: Path) -> dict[str, Any]:
    """What is stored, or the beginning of it."""
    if not path.is_file():
        return {"runs": {}}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise SystemExit(f"{path} does not hold what this command stores, and is left as it is: {error}") from None


def store(path: Path, data: dict[str, Any]) -> None:
    """Write all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    partial.replace(path)


def run(spec: str, op: str, *, problems: int, seed: int, path: Path) -> dict[str, Any]:
    """Measure until `problems` are done, beginning behind those that `path` has; what is then stored for this run."""
    provider = load_provider(spec)
    reason = provider.unavailable()
    if reason is not None:
        raise RuntimeError(f"{spec} cannot run here: {reason}")
    key = f"{spec}, {op}, seed {seed}"
    done = load(path)["runs"].get(key, {})
    begun_with = {"sources": sources(), "versions": versions()}
    if done and any(done[name] != now for name, now in begun_with.items()):
        print(f"{key}: kernels, bound, drawing or packages have changed; starting afresh", file=sys.stderr)
        done = {}
    if not done:
        done = {"provider": spec, "op": op, "seed": seed, "problems": 0, "cells": {}, **begun_with}
    for index in range(done["problems"], problems):
        try:
            measure(provider, op, seed, index, done["cells"])
        except Exception as error:
            error.add_note(f"again: python -m bench.bounds --provider {spec} --op {op} --seed {seed} --index {index}")
            raise
        done["problems"] = index + 1
        if (index + 1) % FLUSH_EVERY == 0 or index + 1 == problems:
            _keep(path, key, done)
    return dict(done)


def _keep(path: Path, key: str, done: dict[str, Any]) -> None:
    data = load(path)  # another provider's run may have stored something meanwhile
    data["runs"][key] = done
    store(path, data)


def ratio_of(cell: dict[str, Any]) -> float:
    """The cell's largest error / bound."""
    return max(cell["out"], cell["lse"])


def outside(done: dict[str, Any]) -> list[str]:
    """Cells whose ratio is not in [0.02, 1], in words."""
    return [
        f"{done['provider']}, {done['op']}: {name}: {ratio_of(cell):.3g} is not in [{LEAST}, {MOST}]; --index "
        f"{cell['worst'].get('index')}"
        for name, cell in sorted(done["cells"].items())
        if not LEAST <= ratio_of(cell) <= MOST
    ]


def rows(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The table: a row for each cell."""
    for done in runs:
        for name, cell in done["cells"].items():
            worst = f"{cell['worst'].get('index')}: {cell['worst'].get('numbers')}"
            figures = (f"{cell['out']:.3f}", f"{cell['lse']:.3f}", str(cell["problems"]))
            yield (done["provider"], done["op"], name, *figures, worst)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s bounds --", description=__doc__.partition("\n")[0])
    parser.add_argument("--provider", action="append", help="a name, MODULE:NAME or PATH.py:NAME; ours by default")
    parser.add_argument("--op", action="append", choices=list(OPS), help="both by default")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="of each provider and op; few fill no cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=STORED, help="where results are stored and gone on from")
    parser.add_argument("--index", type=int, help="run this problem alone, and store nothing")
    chosen = parser.parse_args(arguments)
    if chosen.problems < 1 or chosen.seed < 0 or (chosen.index or 0) < 0:
        parser.error("--problems must be at least 1, --seed and --index at least 0")
    specs, ops = chosen.provider or list(OURS), chosen.op or list(OPS)
    if chosen.index is not None:
        return _again(specs, ops, chosen.seed, chosen.index)
    runs = []
    for spec in specs:
        for op in ops:
            runs.append(run(spec, op, problems=chosen.problems, seed=chosen.seed, path=chosen.out))
    print(table(("provider", "op", "cell", "out", "lse", "problems", "worst"), list(rows(runs))))
    print("out, lse: largest |error| / bound; worst: --index of the problem, and its numbers")
    found = [reason for done in runs for reason in outside(done)]
    for reason in found:
        print(f"FAILED {reason}", file=sys.stderr)
    return 1 if found else 0


def _again(specs: Sequence[str], ops: Sequence[str], seed: int, index: int) -> int:
    for spec in specs:
        for op in ops:
            cells: Cells = {}
            print(spec, op, measure(load_provider(spec), op, seed, index, cells))
            for name, cell in cells.items():
                print(f"  {name}: out {cell['out']:.4f}, lse {cell['lse']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
