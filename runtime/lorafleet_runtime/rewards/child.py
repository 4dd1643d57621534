"""The reward child process: `python -m lorafleet_runtime.rewards.child`, started by `process.RewardProcess`.

Speaks JSON lines. First line in: {"target": "module.function", "memoryBytes": N}; answer {"ok": true} or
{"error": ...}. Then one line per call: {"prompt", "response", "label", "metadata", "truncated"}; answer
{"value": float} or {"error": ...}. Imports no torch. The function's own prints go to stderr, and what it reads from
stdin is empty.

    stdin ─▶ reader thread ─▶ queue ─▶ main thread: calls the function ─▶ the pipe that was stdout
             (exits the process at end of file, also while the function hangs)
"""

import contextlib
import importlib
import inspect
import json
import math
import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from lorafleet_runtime.errors import sendable

_KEYWORDS = ("prompt", "response", "label", "metadata", "truncated")
_MAX_TEXT = 2000  # characters of an exception's text that travel back
_MAX_TRACEBACK = 8000  # and of its traceback


def main() -> None:
    """Serve until stdin ends."""
    incoming, outgoing = _take_over_stdio()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(incoming, lines), daemon=True).start()
    function: Callable[..., Any] | None = None
    while True:
        message = json.loads(lines.get())
        try:
            if function is None:
                limit_memory(message["memoryBytes"])
                function = load(message["target"])
                answer: dict[str, Any] = {"ok": True}
            else:
                answer = {"value": call(function, message)}
        # The loop boundary: whatever a user's function raises, sys.exit included, is an answer.
        except MemoryError:
            limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
            answer = {"error": f"MemoryError: more than the {limit >> 20} MiB of the pool's rollout.rewardMemoryBytes"}
        except (Exception, SystemExit) as error:  # noqa: BLE001
            traceback.print_exc(file=sys.stderr)
            answer = {
                "error": _told(error),
                "traceback": sendable(traceback.format_exc()[-_MAX_TRACEBACK:]),
            }
        outgoing.write(json.dumps(answer) + "\n")
        outgoing.flush()


def _told(error: BaseException) -> str:
    try:
        return sendable(f"{type(error).__name__}: {error}"[:_MAX_TEXT])
    except Exception:  # noqa: BLE001 - the function's own exception class may be as broken as the function
        return f"{type(error).__name__} (its text cannot be made)"


def limit_memory(num_bytes: int) -> None:
    """Bound what this process may allocate, and have the kernel take it first when memory runs out all the same."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)  # a host's own lower bound holds
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):  # no /proc: nothing to prefer
        Path("/proc/self/oom_score_adj").write_text("1000")


def load(target: str) -> Callable[..., Any]:
    """Import a function by dotted path and check that it takes the keywords.

    Raises:
        Exception: whatever the import raises; TypeError when it is no such function.
    """
    module_name, _, name = target.rpartition(".")
    function = getattr(importlib.import_module(module_name), name)
    if not callable(function):
        raise TypeError(f"{target} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have none
        return function  # type: ignore[no-any-return]
    try:
        signature.bind(**dict.fromkeys(_KEYWORDS))
    except TypeError as error:
        raise TypeError(
            f"{target}{signature} cannot be called with keywords {', '.join(_KEYWORDS)}: {error}"
        ) from error
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., Any], message: dict[str, Any]) -> float:
    """The function's reward as a finite float.

    Raises:
        ValueError: it returned something else.
    """
    value = function(**{key: message[key] for key in _KEYWORDS})
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {value!r:.200}; return a finite number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of several numbers, an integer beyond floats
        raise ValueError(f"returned a {type(value).__name__} ({error}); return a finite number") from error
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; return a finite number")
    return number


def _take_over_stdio() -> tuple[IO[str], IO[str]]:
    """Private copies of the protocol's pipes; 0 becomes the null device and 1 becomes stderr, also for subprocesses."""
    incoming = os.fdopen(os.dup(0), "r", encoding="utf-8")
    outgoing = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return incoming, outgoing


def _read(incoming: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    for line in incoming:
        lines.put(line)
    os._exit(0)  # the parent is gone; a hanging function must not keep this process


if __name__ == "__main__":
    main()
