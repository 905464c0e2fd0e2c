"""The command line: exit codes, messages, and what spawned engine processes do with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vvllm_msd import cli
from vvllm_msd.config import DaemonConfig
from vvllm_shared.errors import Exit

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "vvllm-msd")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("VVLLM_")}


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=CLEAN | {"HOME": "/nonexistent"} | env,
    )


@pytest.mark.parametrize("args", [("--help",), ("serve", "--help"), ("verify", "--help"), ("demo", "--help")])
def test_help(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert (done.returncode, done.stderr) == (Exit.OK, "")
    assert "usage: vvllm-msd" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ((), Exit.USAGE, "COMMAND"),
        (("sevre",), Exit.USAGE, "invalid choice"),
        (("serve", "--slot", "8"), Exit.USAGE, "Unknown argument --slot.\n  Did you mean --slots?"),
        (("serve", "--nothing-like-it=3"), Exit.USAGE, "Unknown argument --nothing-like-it."),
        (("serve", "extra"), Exit.USAGE, "Unknown argument extra."),
        (("serve", "--engine", "dtype"), Exit.USAGE, "--engine dtype has no value"),
        (("serve",), Exit.CONFIG, "No model is configured."),
        (("serve", "--model", "/m", "--slots", "many"), Exit.CONFIG, "cache.slots = 'many' (--slots)"),
        (("serve", "--model", "/m", "--slots", "8", "--cache-gb", "2"), Exit.CONFIG, "Both cache.slots"),
        (("serve", "--model", "/m", "--policy", "lru"), Exit.CONFIG, "one of lfru, layer, off"),
        (("serve", "--config", "/nonexistent/x.toml"), Exit.CONFIG, "cannot be read"),
        (("verify", "--model", "/m"), Exit.USAGE, "--slots"),
        (("verify", "--model", "/m", "--slots", "4", "--cache-gb", "1"), Exit.USAGE, "not allowed with"),
        (("verify", "--model", "/m", "--slots", "4", "--reference", "x"), Exit.USAGE, "invalid choice"),
    ],
)
def test_mistakes(args: tuple[str, ...], code: Exit, says: str) -> None:
    done = run(*args)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_model_is_bad_input() -> None:
    done = run("serve", "--model", "/nonexistent/model", VVLLM_RUNTIME_DIR="/nonexistent/run")
    assert done.returncode == Exit.BAD_INPUT, done.stderr
    assert "/nonexistent/model" in done.stderr


def test_a_mistake_in_the_environment() -> None:
    done = run("serve", VVLLM_CACHE_SLOT="8")
    assert done.returncode == Exit.CONFIG
    assert "Did you mean VVLLM_CACHE_SLOTS?" in done.stderr


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vvllm_msd", "serve", "--slot"],
        capture_output=True,
        text=True,
        check=False,
        env=CLEAN,
    )
    assert done.returncode == Exit.USAGE
    assert "Did you mean --slots?" in done.stderr


def replace_lifecycle(monkeypatch: pytest.MonkeyPatch, serve: Callable[[DaemonConfig], int]) -> None:
    lifecycle = SimpleNamespace(serve=serve)
    monkeypatch.setattr("vvllm_msd.lifecycle", lifecycle, raising=False)
    monkeypatch.setitem(sys.modules, "vvllm_msd.lifecycle", lifecycle)


def test_flags_become_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[DaemonConfig] = []
    replace_lifecycle(monkeypatch, lambda config: seen.append(config) or 7)
    file = tmp_path / "f.toml"
    file.write_text("[server]\ndrain_seconds = 3", encoding="utf-8")
    flags = [
        "--model",
        "/m",
        "--slots",
        "9",
        "--vision",
        "--json-log",
        "--engine",
        "seed=3",
        "--engine",
        "dtype=float32",
    ]
    assert cli.main(["serve", "--config", str(file), *flags]) == 7
    (config,) = seen
    assert (config.model, config.cache.slots, config.server.vision, config.log.json) == ("/m", 9, True, True)
    assert config.engine == {"seed": 3, "dtype": "float32"}
    assert (config.server.drain_seconds, config.source("cache.slots")) == (3, "flag")


def test_a_bug_is_shown_as_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_lifecycle(monkeypatch, lambda config: 1 // 0)
    assert cli.main(["serve", "--model", "/m"]) == Exit.INTERNAL
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["msgspec", "structlog", "uvicorn"])
def test_a_client_s_installation_names_what_the_daemon_needs(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    done = run("serve", "--model", "/nonexistent/model", PYTHONPATH=str(tmp_path))
    assert done.returncode == Exit.CONFIG, done.stderr
    assert f"The Python module {module} is not installed." in done.stderr
    assert 'pip install "vvllm-ms[cuda]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_another_module_that_is_missing_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vvllm_msd.lifecycle", None)
    monkeypatch.delattr("vvllm_msd.lifecycle", raising=False)
    assert cli.main(["serve", "--model", "/m"]) == Exit.INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_the_module_is_light() -> None:
    heavy = "{'torch', 'vllm', 'zmq', 'starlette', 'uvicorn', 'numpy', 'msgspec', 'structlog', 'psutil'}"
    program = (
        f"import sys, vvllm_msd.cli; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("as_module", [True, False])
def test_a_spawned_process_dies_with_the_daemon(tmp_path: Path, as_module: bool) -> None:
    """The daemon's main module is imported by what it spawns, in both ways of starting it."""
    lifecycle = (
        "import sys, types, vvllm_msd\n"
        "def serve(config):\n"
        "    import multiprocessing, time\n"
        "    process = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,))\n"
        "    process.start(); print(process.pid, flush=True); time.sleep(60)\n"
        "vvllm_msd.lifecycle = sys.modules['vvllm_msd.lifecycle'] = types.SimpleNamespace(serve=serve)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(lifecycle, encoding="utf-8")
    command = [sys.executable, "-m", "vvllm_msd"] if as_module else [SCRIPT]
    daemon = subprocess.Popen(
        [*command, "serve", "--model", "/m"],
        stdout=subprocess.PIPE,
        text=True,
        env=CLEAN | {"PYTHONPATH": str(tmp_path)},
    )
    assert daemon.stdout is not None
    child = int(daemon.stdout.readline())
    time.sleep(1.5)  # it has imported its main module by now
    daemon.send_signal(signal.SIGKILL)
    daemon.communicate()
    deadline = time.monotonic() + 2
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "the child outlived the daemon"
        time.sleep(0.02)


def test_a_spawned_process_whose_parent_is_gone_already_ends() -> None:
    """As multiprocessing would import it, with another parent than the one that meant to spawn it."""
    program = "import sys; sys.modules['__mp_main__'] = sys; import vvllm_msd.cli; print('lives')"
    for pid, lives in ((os.getpid(), "lives\n"), (1, "")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=CLEAN | {"_VVLLM_PARENT": str(pid)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == lives


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"
