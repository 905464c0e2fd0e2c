"""What host memory is left, read from a machine and from cgroups with and without limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from vvllm_msd.memory import HostMemory, check_host_memory, host_memory
from vvllm_shared.errors import BusyError, Exit
from vvllm_shared.limits import GIB, KIB

MACHINE = 64 * GIB


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    directory = tmp_path / "proc"
    (directory / "self").mkdir(parents=True)
    (directory / "self/cgroup").write_text("4:memory:/old\n0::/a.slice/b.service\n")
    (directory / "meminfo").write_text(f"MemTotal: {2**40} kB\nMemAvailable:   {MACHINE // KIB} kB\n")
    return directory


def group(tmp_path: Path, name: str, limit: str, used: int, cached: int = 0) -> None:
    directory = tmp_path / "cgroups" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    stat = f"anon 5\nfile {cached + 7}\nshmem 7\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}\n"
    (directory / "memory.stat").write_text(stat)


def test_this_machine() -> None:
    assert host_memory().available > 0


@pytest.mark.parametrize("cgroup", [None, "4:memory:/old\n", "0::/\n", "0::/gone\n"])
def test_a_machine_without_limits(proc: Path, tmp_path: Path, cgroup: str | None) -> None:
    (proc / "self/cgroup").unlink()
    if cgroup is not None:
        (proc / "self/cgroup").write_text(cgroup)
    assert host_memory(proc, tmp_path / "cgroups") == HostMemory(MACHINE, "machine")


def test_the_group_s_own_limit(proc: Path, tmp_path: Path) -> None:
    group(tmp_path, "a.slice/b.service", "1000", used=900, cached=50)
    memory = host_memory(proc, tmp_path / "cgroups")
    assert memory == HostMemory(150, str(tmp_path / "cgroups/a.slice/b.service"))


def test_a_limit_around_it_binds_too(proc: Path, tmp_path: Path) -> None:
    group(tmp_path, "a.slice/b.service", str(2 * MACHINE), used=0)
    group(tmp_path, "a.slice", "1000", used=2000)
    assert host_memory(proc, tmp_path / "cgroups") == HostMemory(0, str(tmp_path / "cgroups/a.slice"))


def test_groups_without_a_limit_do_not_bind(proc: Path, tmp_path: Path) -> None:
    group(tmp_path, "a.slice/b.service", "max", used=2000)
    (tmp_path / "cgroups/a.slice/memory.max").write_text("nonsense")
    assert host_memory(proc, tmp_path / "cgroups").bound == "machine"


@pytest.mark.parametrize(
    ("bound", "says"), [("machine", "this machine has 10.0 GiB left"), ("/g", "the cgroup /g has 10.0 GiB")]
)
def test_experts_that_do_not_fit(bound: str, says: str) -> None:
    check_host_memory(10 * GIB, HostMemory(10 * GIB, bound))
    with pytest.raises(BusyError, match=says) as refused:
        check_host_memory(20 * GIB, HostMemory(10 * GIB, bound))
    assert refused.value.exit_code == Exit.BUSY
    assert "20.0 GiB" in refused.value.sentence
    assert refused.value.hint
