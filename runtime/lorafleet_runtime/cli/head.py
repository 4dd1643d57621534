"""The supervisor: starts the Ray head, runs `serve`, and starts it again when it dies, without taking Ray down.

One that is started in the place of a killed one first ends what that left behind (predecessor.py).
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

from lorafleet_runtime.cli.predecessor import end_predecessor, end_tree, identity, refuse_living_head
from lorafleet_runtime.config.config import RuntimeConfig
from lorafleet_runtime.errors import ConfigError

log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 30.0
_STABLE_SECONDS = 60.0
SERVE_STOP_SECONDS = 30.0
"""From SIGTERM to SIGKILL: longer than serve takes to save its runs, end its HTTP server and write its logs."""
RAY_STOP_SECONDS = 5.0
"""For Ray, which keeps nothing."""


def supervise(config_path: Path, config: RuntimeConfig) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status.

    A `serve` that exits with 2 (its configuration cannot work) ends the supervisor too: a restart would not help.

    Raises:
        ConfigError: the Ray head does not start, or another supervisor runs with this configuration.
    """
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    refuse_living_head(config.state_file)
    end_predecessor(config.state_file, SERVE_STOP_SECONDS, RAY_STOP_SECONDS)
    ray_head, address = _start_ray(config)
    try:
        return _keep_serving(config_path, config, ray_head, address, stop)
    finally:
        _stop(ray_head, RAY_STOP_SECONDS)


def _keep_serving(
    config_path: Path, config: RuntimeConfig, ray_head: "subprocess.Popen[bytes]", address: str, stop: threading.Event
) -> int:
    command = [sys.executable, "-m", "lorafleet_runtime.cli", "serve", "--config", str(config_path)]
    backoff = _FIRST_BACKOFF_SECONDS
    while True:
        started = time.monotonic()
        serve = subprocess.Popen([*command, "--ray-address", address])
        _write_state(config, address, ray=ray_head.pid, serve=serve.pid)
        while serve.poll() is None and ray_head.poll() is None and not stop.is_set():
            stop.wait(0.2)
        if stop.is_set():
            _stop(serve, SERVE_STOP_SECONDS)
            return 0
        if ray_head.poll() is not None:
            log.error("the Ray head exited with %s; this supervisor ends too", ray_head.returncode)
            _stop(serve, SERVE_STOP_SECONDS)
            return 1
        if serve.returncode == 2:
            return 2
        if time.monotonic() - started > _STABLE_SECONDS:
            backoff = _FIRST_BACKOFF_SECONDS
        log.error("serve exited with %s; starting it again in %.1f s", serve.returncode, backoff)
        stop.wait(backoff)
        backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)


def _start_ray(config: RuntimeConfig) -> "tuple[subprocess.Popen[bytes], str]":
    """Start `ray start --head --block` on free ports of 127.0.0.1 (or of the pod's address) and wait for it."""
    # Ray turns 127.0.0.1 into the address of the host; any other loopback address stays on the loopback.
    host = "127.0.0.2" if config.local_resources else socket.gethostbyname(socket.gethostname())
    port = _free_port() if config.local_resources else 6379
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats",
        f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false",
        f"--ray-client-server-port={_free_port()}", f"--dashboard-agent-listen-port={_free_port()}",
        f"--object-store-memory={config.object_store_bytes}",
        # Ports that workers bind at random: Ray's default range starts at 10002 for every head of a machine.
        "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    if config.local_resources:
        command.append("--num-cpus=0")
    if config.ray_temp_dir is not None:
        command.append(f"--temp-dir={config.ray_temp_dir}")
    # A token of this head's own: Ray's default one lies in the home folder, where two heads overwrite each other's.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Nothing in Ray outlives a stop: checkpoints are on storage, so draining would only make the stop slow.
    process = subprocess.Popen(command, env=os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"})
    _write_state(config, f"{host}:{port}", ray=process.pid)
    deadline = time.monotonic() + 60
    while not _listens(host, port):
        if process.poll() is not None or time.monotonic() > deadline:
            _stop(process, RAY_STOP_SECONDS)
            raise ConfigError(f"the Ray head did not start on {host}:{port}; its output above says why")
        time.sleep(0.1)
    return process, f"{host}:{port}"


def _write_state(config: RuntimeConfig, address: str, **pids: int) -> None:
    if config.state_file is None:
        return
    state = {"rayAddress": address, "head": identity(os.getpid()), **{name: identity(p) for name, p in pids.items()}}
    temporary = config.state_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(state))
    temporary.replace(config.state_file)


def _stop(process: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """End the process and every descendant that it leaves behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        end_tree(psutil.Process(process.pid), grace_seconds)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))  # on every address, as Ray's servers do
        return int(probe.getsockname()[1])


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
