"""asv ignores what it does not know, so that a typo in its settings voids a gate: every key and pattern is tested."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asv.build_cache
import asv.config
import asv.machine
import asv.util
import pytest

import bench
from bench import _asv_env, _machine

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "asv.conf.json"


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return dict(vars(asv.config.Config.load(str(CONFIG))))


def benchmarks() -> Iterator[tuple[str, Any]]:
    """Name and function of every benchmark of the suite, named as asv names them."""
    for module_info in pkgutil.iter_modules(bench.__path__):
        if module_info.name.startswith("_") or not (ROOT / "bench" / f"{module_info.name}.py").is_file():
            continue
        module = importlib.import_module(f"bench.{module_info.name}")
        for class_name, cls in inspect.getmembers(module, inspect.isclass):
            if not class_name.startswith("_") and cls.__module__ == module.__name__:
                for name, function in inspect.getmembers(cls, inspect.isfunction):
                    if re.match("(time|track|peakmem|mem)_", name):
                        yield f"{module_info.name}.{class_name}.{name}", function


def test_helpers_are_not_taken_for_benchmarks() -> None:
    """asv runs every function whose name starts so; ours are methods, so that parameters are never forgotten."""
    for module_info in pkgutil.iter_modules(bench.__path__):
        module = importlib.import_module(f"bench.{module_info.name}")
        own = [n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
        assert not [name for name in own if re.match("(time|track|mem|peakmem|timeraw)_", name)], module.__name__


def test_asv_knows_every_key() -> None:
    written = asv.util.load_json(str(CONFIG), api_version=1, js_comments=True)
    known = {*vars(asv.config.Config()), "version"}
    # The one key that asv reads without declaring it.
    assert "'build_cache_size'" in inspect.getsource(asv.build_cache)
    assert set(written) - known == {"build_cache_size"}


def test_a_misspelt_key_would_be_ignored(tmp_path: Path) -> None:
    """Why the test above is needed."""
    (tmp_path / "asv.conf.json").write_text(json.dumps({"version": 1, "repo": ".", "regression_thresholds": {".*": 0}}))
    config = asv.config.Config.load(str(tmp_path / "asv.conf.json"))
    assert config.regressions_thresholds == {}


def test_paths(settings: dict[str, Any]) -> None:
    assert (ROOT / settings["benchmark_dir"] / "__init__.py").is_file()
    assert settings["results_dir"] == "results/asv"
    ignored = [settings["html_dir"], settings["env_dir"], "results/local"]
    for path in ignored:
        done = subprocess.run(["git", "check-ignore", "-q", f"{path}/x"], cwd=ROOT, check=False)
        assert done.returncode in (0, 128), path  # 128: not a checkout


def test_commands_name_what_asv_fills_in(settings: dict[str, Any]) -> None:
    filled = {"project", "conf_dir", "env_dir", "build_dir", "build_cache_dir", "wheel_file"}
    commands = [*settings["build_command"], *settings["install_command"], *settings["uninstall_command"]]
    for command in commands:
        assert set(re.findall(r"{(\w+)}", command)) <= filled, command
    scripts = [name for command in commands for name in re.findall(r"{conf_dir}/(\S+\.py)", command)]
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_code_generation_has_no_tolerance(settings: dict[str, Any]) -> None:
    names = [name for name, _ in benchmarks() if name.startswith("codegen.")]
    assert len(names) >= 5
    for name in names:
        matching = [value for pattern, value in settings["regressions_thresholds"].items() if re.match(pattern, name)]
        assert matching == [0.0], name


def test_code_generation_series_survive_edits() -> None:
    for name, function in benchmarks():
        if name.startswith("codegen."):
            assert function.version == "1", name
            assert function.__doc__, name


def test_only_rates_are_left_unjudged(settings: dict[str, Any]) -> None:
    (pattern,) = settings["regressions_first_commits"]
    assert settings["regressions_first_commits"][pattern] is None
    for name, function in benchmarks():
        is_rate = str(getattr(function, "unit", "")).endswith("/s")
        assert bool(re.match(pattern, name)) == is_rate, name


def test_environment_gets_packages_but_not_this_project(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    script = str(ROOT / "bench" / "_asv_env.py")
    env = {name: value for name, value in os.environ.items() if name not in (_asv_env.VARIABLE, "VIRTUAL_ENV")}
    for _ in range(2):  # again for every commit, over what is there
        subprocess.run([str(python), script, str(environment)], check=True, env=env)
    code = (
        "import importlib.util as u, json, numpy\n"
        "from cupy.cuda import nvrtc\n"
        "nvrtc.getVersion()\n"
        "print(json.dumps([numpy.__file__, *(u.find_spec(n) is not None for n in ('torch', 'triton', 'pagebench'))]))"
    )
    done = subprocess.run([str(python), "-P", "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    where, torch, triton, pagebench = json.loads(done.stdout)
    assert where.startswith(str(environment / "shared"))
    assert (torch, triton, pagebench) == (True, True, False)


@pytest.mark.parametrize(
    "name", ["pagebench", "pagebench-0.1.0.dist-info", "__editable___pagebench_finder.py", "x.pth"]
)
def test_what_is_never_shared(name: str) -> None:
    assert not _asv_env._is_shared(name)


def test_unknown_python_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 2**30)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv(_asv_env.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=_asv_env.VARIABLE):
        _asv_env._asv_python()


def test_machine_is_described_alike_every_time(tmp_path: Path) -> None:
    machine_file, results = tmp_path / "machines.json", tmp_path / "results"
    first = _machine.pin("laptop", results, machine_file)
    assert not re.search(r"\d", first["os"]), "a kernel upgrade would split every series"
    assert re.fullmatch(r"\d+ GiB", first["ram"])
    (results / "laptop").mkdir(parents=True)
    kept = first | {"cpu": "as it was called then", "version": 1}
    (results / "laptop" / "machine.json").write_text(json.dumps(kept))
    _machine.pin("other", results, machine_file)
    assert _machine.pin("laptop", results, machine_file)["cpu"] == "as it was called then"
    stored = json.loads(machine_file.read_text())
    assert set(stored) == {"laptop", "other", "version"}
    assert set(first) >= {name for name, _ in asv.machine.Machine.fields}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".hidden"])
def test_machine_name_is_a_folder_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine must be a plain folder name"):
        _machine.pin(name, tmp_path, tmp_path / "machines.json")
