"""Processes of a stack are found again and stopped, and no others."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lorafleet_local import processes
from lorafleet_local.processes import StartError, find, start, stop, sweep, wait_until

SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def stack_id() -> Iterator[str]:
    marker = uuid.uuid4().hex
    yield marker
    sweep(marker, 0.0)


def is_up(log: Path) -> bool:
    return log.is_file() and "up" in log.read_text()


def test_stop_ends_the_process_with_sigterm(tmp_path: Path, stack_id: str) -> None:
    process = start("sleeper", SLEEP, tmp_path / "log", stack_id)
    wait_until("sleeper", lambda: is_up(tmp_path / "log"), 30.0, process)
    assert find(process) is not None
    assert stop([process], 30.0) == []
    assert find(process) is None


def test_a_reused_pid_is_not_ours(stack_id: str) -> None:
    mine = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    try:
        other = processes.Process("gone", mine.pid, started=1, log="")
        assert find(other) is None
        assert stop([other], 1.0) == []
        assert mine.poll() is None, "a process with another start time was signalled"
    finally:
        mine.kill()
        mine.wait()


def test_start_time_identifies_the_process(tmp_path: Path, stack_id: str) -> None:
    process = start("sleeper", SLEEP, tmp_path / "log", stack_id)
    assert find(replace(process, started=process.started + 1)) is None
    assert find(process) is not None


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, stack_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LINGER_SECONDS", 0.1)
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}]).wait()"
    process = start("parent", [sys.executable, "-S", "-c", parent], tmp_path / "log", stack_id)
    wait_until("child", lambda: is_up(tmp_path / "log"), 30.0, process)
    (child,) = psutil.Process(process.pid).children()
    assert [line.split()[0] for line in stop([process], 30.0)] == [str(child.pid)]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_sweep_finds_what_detached_itself(tmp_path: Path, stack_id: str) -> None:
    daemon = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}], start_new_session=True)"
    parent = start("parent", [sys.executable, "-S", "-c", daemon], tmp_path / "log", stack_id)
    wait_until("daemon", lambda: is_up(tmp_path / "log") and find(parent) is None, 30.0)
    assert stop([parent], 1.0) == []
    assert len(sweep(stack_id, 0.1)) == 1
    assert sweep(stack_id, 0.1) == []


def test_sweep_spares_other_stacks(tmp_path: Path, stack_id: str) -> None:
    process = start("sleeper", SLEEP, tmp_path / "log", stack_id)
    assert sweep("another-stack", 0.1) == []
    assert find(process) is not None


def test_wait_until_shows_the_log_of_a_process_that_died(tmp_path: Path, stack_id: str) -> None:
    argv = [sys.executable, "-S", "-c", "import sys; sys.exit('flag --wrong is unknown')"]
    process = start("broken", argv, tmp_path / "broken.log", stack_id)
    with pytest.raises(StartError, match=r"broken ended\n.*--wrong is unknown(.|\n)*broken\.log"):
        wait_until("broken", lambda: False, 30.0, process)


def test_wait_until_gives_up_in_time() -> None:
    with pytest.raises(StartError, match="nothing: not ready after 0 s"):
        wait_until("nothing", lambda: False, 0.1)


def test_zombies_count_as_ended(tmp_path: Path, stack_id: str) -> None:
    process = start("sleeper", SLEEP, tmp_path / "log", stack_id)
    os.kill(process.pid, signal.SIGKILL)
    wait_until("its end", lambda: find(process) is None, 30.0)


def test_peak_memory_is_listed_by_name(tmp_path: Path, stack_id: str) -> None:
    process = start("sleeper", SLEEP, tmp_path / "log", stack_id)
    wait_until("sleeper", lambda: is_up(tmp_path / "log"), 30.0, process)
    (peak,) = processes.peak_rss_bytes(stack_id, [process]).values()
    assert 1 << 20 < peak < 1 << 30


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/venv/bin/python", "-m", "lorafleet_runtime.cli", "serve"], "lorafleet_runtime.cli"),
        (["/venv/bin/python3.12", "-u", "/venv/bin/lorafleet-operator", "--namespace", "x"], "lorafleet-operator"),
        (["/cache/bin/kube-apiserver-1.37.2", "--bind-address=127.0.0.1"], "kube-apiserver"),
        (["ray::TrainerActor.accumulate"], "ray-TrainerActor"),
        (["VLLM::EngineCore"], "vllm-EngineCore"),
        (["/venv/bin/python", "-c", "from multiprocessing.resource_tracker import main;main(66)"], "multiprocessing"),
        ([], "unknown"),
    ],
)
def test_short_names(argv: list[str], name: str) -> None:
    assert processes._short_name(argv) == name
