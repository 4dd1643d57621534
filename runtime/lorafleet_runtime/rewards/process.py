"""The parent's side of a reward child process: start, one call at a time with a timeout, restart after a hang.

Called by the rollout worker, one `RewardProcess` per run. Any exchange that does not end in an answer (timeout,
cancellation, death) kills the child, so that a late answer can never be taken for the next call's.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

_LOAD_TIMEOUT_SECONDS = 120.0
_LINE_LIMIT_BYTES = 1 << 20


class RewardFailure(Exception):
    """The reward raised, hung, died or returned no finite number; the text says which."""


class RewardProcess:
    """A child process with one reward function loaded.

    Args:
        target: dotted path of the function.
        timeout_seconds: time one call may take.
    """

    def __init__(self, target: str, timeout_seconds: float) -> None:
        self._target = target
        self._timeout = timeout_seconds
        self._child: asyncio.subprocess.Process | None = None
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
        """One call; starts the child again if it is gone. Waiting for other calls does not count as its time.

        Raises:
            RewardFailure: no finite number within the timeout.
        """
        message = {"prompt": prompt, "response": response, "label": label, "metadata": metadata}
        async with self._lock:
            await self._ensure()
            answer = await self._exchange({**message, "truncated": truncated}, self._timeout)
        return float(answer["value"])

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
        # -P: the working directory is nobody's module path. A session of its own, so that a kill takes what it started.
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "lorafleet_runtime.rewards.child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ}, limit=_LINE_LIMIT_BYTES, start_new_session=True,
        )  # fmt: skip
        if self._closed:  # while the child was being made
            await self._kill()
            raise RewardFailure("the reward process is closed")
        try:
            await self._exchange({"target": self._target}, _LOAD_TIMEOUT_SECONDS)
        except RewardFailure:
            await self._kill()
            raise

    async def _exchange(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(timeout):
                child.stdin.write(json.dumps(message, default=str).encode() + b"\n")
                await child.stdin.drain()
                line = await child.stdout.readline()
        except TimeoutError as error:
            raise RewardFailure(f"no answer within {timeout:g} s") from error
        except (ConnectionError, ValueError) as error:
            raise RewardFailure(f"the reward process broke its pipe ({error})") from error
        finally:
            if not line.endswith(b"\n"):
                await self._kill()
        if not line.endswith(b"\n"):
            raise RewardFailure(f"the reward process exited with code {child.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RewardFailure(str(answer["error"]))
        return answer

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it is gone already, and so is its group
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
