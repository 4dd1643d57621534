"""The parent's side of a reward child process: start, one call at a time with a timeout, restart after a hang.

Called by the rollout worker, one `RewardProcess` per run. Any exchange that does not end in an answer (timeout,
cancellation, death) kills the child and what it started, so that a late answer can never be taken for the next call's;
that waits for nothing but the child itself. What the function prints goes to the worker's log, bounded: a function that
prints without end must not fill the disk that all runs share.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_SECONDS = 120.0
_LINE_LIMIT_BYTES = 1 << 20
_LOGGED_BYTES = 4096
"""Of each call's prints, how much reaches the log."""
_PRINTED_BYTES = 4 << 20
"""Of each call's prints, how much is taken at all; then the call has failed."""
_LAST_PRINTS_SECONDS = 0.2
"""For what a killed child printed last, where something else holds its pipe open."""
_MARK = "LORAFLEET_REWARD_PROCESS"
"""Environment variable by which what a child started is known, also outside its process group."""


class RewardFailure(Exception):
    """The reward raised, hung, died or returned no finite number; the text says which.

    Args:
        text: one line.
        traceback: of the function, where it raised.
    """

    def __init__(self, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.traceback = traceback


class RewardDied(RewardFailure):
    """The child ended by itself, or somebody killed it."""


class RewardProcess:
    """A child process with one reward function loaded.

    Args:
        target: dotted path of the function.
        timeout_seconds: time one call may take.
        memory_bytes: memory that the child may allocate.
    """

    def __init__(self, target: str, timeout_seconds: float, memory_bytes: int) -> None:
        self._target = target
        self._timeout = timeout_seconds
        self._memory = memory_bytes
        self._printed = 0
        self._printer: asyncio.Task[None] | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._mark = secrets.token_hex(16)
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def start(self) -> None:
        """Start the child and load the function; does nothing when it runs.

        Raises:
            RewardFailure: the function cannot be loaded.
        """
        async with self._lock:
            await self._ensure()

    async def score(
        self, *, prompt: Any, response: str, label: Any, metadata: dict[str, Any], truncated: bool
    ) -> float:
        """One call; starts the child again if it is gone, also when it dies under the call, once.

        Waiting for other calls does not count as its time.

        Raises:
            RewardFailure: no finite number within the timeout.
        """
        message = {
            "prompt": prompt, "response": response, "label": label, "metadata": metadata, "truncated": truncated
        }  # fmt: skip
        async with self._lock:
            try:
                answer = await self._call(message)
            except RewardDied as death:  # the kernel may have wanted its memory: only the second death is its own fault
                if self._closed:
                    raise
                log.warning("%s: %s; calling it once more", self._target, death)
                answer = await self._call(message)
        return float(answer["value"])

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        await self._ensure()
        return await self._exchange(message, self._timeout)

    async def close(self) -> None:
        """End the child for good, also while it serves a call; that call and those that wait for it fail."""
        self._closed = True
        await self._kill()

    async def _ensure(self) -> None:
        if self._closed:
            raise RewardFailure("the reward process is closed")
        if self.pid is not None:
            return
        await self._kill()
        loop = asyncio.get_running_loop()
        # What create_subprocess_exec does, but it keeps the transport, which _kill needs.
        # -P: the working directory is nobody's module path. A session of its own, so that a kill takes what it started.
        self._transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(_LINE_LIMIT_BYTES, loop),
            sys.executable, "-P", "-m", "lorafleet_runtime.rewards.child",
            env={"OMP_NUM_THREADS": "1", **os.environ, _MARK: self._mark}, start_new_session=True,
        )  # fmt: skip
        self._child = asyncio.subprocess.Process(self._transport, protocol, loop)
        assert self._child.stderr is not None
        self._printer = asyncio.create_task(self._take_prints(self._child, self._child.stderr))
        if self._closed:  # while the child was being made
            await self._kill()
            raise RewardFailure("the reward process is closed")
        try:
            await self._exchange({"target": self._target, "memoryBytes": self._memory}, _LOAD_TIMEOUT_SECONDS)
        except RewardFailure:
            await self._kill()
            raise

    async def _exchange(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        line = b""
        self._printed = 0
        try:
            async with asyncio.timeout(timeout):
                child.stdin.write(json.dumps(message, default=str).encode() + b"\n")
                await child.stdin.drain()
                line = await child.stdout.readline()
        except TimeoutError as error:
            raise RewardFailure(f"no answer within {timeout:g} s") from error
        except ConnectionError as error:
            raise RewardDied(f"the reward process broke its pipe ({error})") from error
        except ValueError as error:
            raise RewardFailure(f"the reward process broke its pipe ({error})") from error
        finally:
            if not line.endswith(b"\n"):
                await self._kill()
        if not line.endswith(b"\n"):
            if self._printed > _PRINTED_BYTES:
                raise RewardFailure(f"printed more than {_PRINTED_BYTES >> 20} MiB in one call; print less")
            raise RewardDied(f"the reward process exited with code {child.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RewardFailure(str(answer["error"]), str(answer.get("traceback", "")))
        return answer

    async def _take_prints(self, child: asyncio.subprocess.Process, prints: asyncio.StreamReader) -> None:
        while chunk := await prints.read(1 << 16):
            room = _LOGGED_BYTES - self._printed
            if room > 0:
                log.info("%s: %s", self._target, chunk[:room].decode(errors="replace").rstrip())
            self._printed += len(chunk)
            if self._printed > _PRINTED_BYTES:
                _kill_group(child)

    async def _kill(self) -> None:
        child, self._child = self._child, None
        transport, self._transport = self._transport, None
        printer, self._printer = self._printer, None
        if child is None or transport is None:
            return
        _kill_group(child)
        _kill_marked(self._mark)
        try:
            if printer is not None:
                await asyncio.wait({printer}, timeout=_LAST_PRINTS_SECONDS)
        finally:
            # wait() returns only once every pipe is closed, and a process that got away may hold them open for ever.
            transport.close()
        await child.wait()
        _kill_marked(self._mark)  # again: one that was just being started showed no environment yet


def _kill_group(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone already, and so is its group
        os.killpg(child.pid, signal.SIGKILL)


def _kill_marked(mark: str) -> None:
    """Kill what left the group but kept its environment. One that cleared it too lives on; nothing waits for it."""
    entry = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is another user's, or gone
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
