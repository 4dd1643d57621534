"""A new supervisor ends exactly what a killed one recorded, serve before Ray, with all descendants; of a living one
nothing.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorafleet_local.supervise import GRACE_SECONDS
from lorafleet_runtime.cli import serve as serve_command
from lorafleet_runtime.cli.head import RAY_STOP_SECONDS, SERVE_STOP_SECONDS, supervise
from lorafleet_runtime.cli.predecessor import end_predecessor, identity, refuse_living_head
from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.errors import ConfigError

PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "import time; time.sleep(60)\n"
)
NOTED = (
    "import signal, sys, time\n"
    "def end(*_):\n"
    "    open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
)


def run(script: str, *arguments: str) -> "tuple[subprocess.Popen[str], str]":
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", script, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


@pytest.fixture
def started() -> Iterator["list[subprocess.Popen[str]]"]:
    children: list[subprocess.Popen[str]] = []
    yield children
    for child in children:
        child.kill()
        child.communicate()


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def record(folder: Path, **about: object) -> Path:
    path = folder / "runtime.json"
    path.write_text(json.dumps(about))
    return path


def test_what_is_recorded_ends_with_its_descendants(tmp_path: Path, started: "list[subprocess.Popen[str]]") -> None:
    ray, grandchild = run(PARENT)
    started.append(ray)
    end_predecessor(record(tmp_path, ray=identity(ray.pid)), 30.0, 30.0)
    assert ray.wait(timeout=30.0) in (-signal.SIGTERM, 0)
    assert not lives(int(grandchild))


def test_a_zombie_that_nobody_reaps_is_not_waited_for(
    tmp_path: Path, started: "list[subprocess.Popen[str]]", caplog: pytest.LogCaptureFixture
) -> None:
    careless, ray = run(PARENT)
    started.append(careless)
    end_predecessor(record(tmp_path, ray=identity(int(ray))), 10.0, 10.0)
    assert "ending it" in caplog.text and "did not stop" not in caplog.text
    assert psutil.Process(int(ray)).status() == psutil.STATUS_ZOMBIE


def test_serve_ends_before_ray_so_that_it_can_save(tmp_path: Path, started: "list[subprocess.Popen[str]]") -> None:
    order = tmp_path / "order"
    ray, serve = run(NOTED, str(order), "ray")[0], run(NOTED, str(order), "serve")[0]
    started += [ray, serve]
    end_predecessor(record(tmp_path, ray=identity(ray.pid), serve=identity(serve.pid)), 30.0, 30.0)
    assert order.read_text().split() == ["serve", "ray"]


def test_a_reused_pid_is_left_alone(tmp_path: Path, started: "list[subprocess.Popen[str]]") -> None:
    other, _ = run(NOTED, os.devnull, "other")
    started.append(other)
    about = identity(other.pid)
    assert about["started"] is not None
    end_predecessor(record(tmp_path, serve=about | {"started": about["started"] - 1}), 30.0, 30.0)
    assert other.poll() is None


def test_a_damaged_or_missing_record_names_nothing(tmp_path: Path) -> None:
    end_predecessor(tmp_path / "missing.json", 1.0, 1.0)
    damaged = tmp_path / "runtime.json"
    damaged.write_text("{")
    end_predecessor(damaged, 1.0, 1.0)


def test_a_supervisor_that_lives_is_named_and_its_runtime_left_alone(
    tmp_path: Path, started: "list[subprocess.Popen[str]]"
) -> None:
    head, serve = run(NOTED, os.devnull, "head")[0], run(NOTED, os.devnull, "serve")[0]
    started += [head, serve]
    path = record(tmp_path, rayAddress="127.0.0.2:1", head=identity(head.pid), serve=identity(serve.pid))
    with pytest.raises(ConfigError, match=rf"the supervisor with pid {head.pid} runs this runtime; stop it first"):
        supervise(tmp_path / "config.yaml", RuntimeConfig.model_construct(state_file=path))
    assert (head.poll(), serve.poll()) == (None, None)


def test_a_supervisor_that_is_gone_or_is_this_process_is_no_obstacle(
    tmp_path: Path, started: "list[subprocess.Popen[str]]"
) -> None:
    refuse_living_head(record(tmp_path, head=identity(os.getpid())))
    gone, _ = run(NOTED, os.devnull, "head")
    started.append(gone)
    path = record(tmp_path, head=identity(gone.pid))
    gone.kill()
    gone.wait()
    refuse_living_head(path)
    refuse_living_head(None)


def test_serve_gets_the_time_that_it_takes_to_stop_and_the_stack_waits_for_that() -> None:
    http_seconds = 2.0
    needed = serve_command._DRAIN_SECONDS + http_seconds + serve_command._FLUSH_SECONDS
    assert needed + 5 <= SERVE_STOP_SECONDS
    assert SERVE_STOP_SECONDS + RAY_STOP_SECONDS + 5 <= GRACE_SECONDS
