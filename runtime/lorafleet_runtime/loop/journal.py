"""Each run's own log, on storage: `{run directory}/log.jsonl`, and `log.1.jsonl` before it.

A logging handler: a record that carries `extra=about(uid, ...)` also goes into that run's file, as one JSON line
{"time", "level", "message", figures...}. So the runtime's log and the run's never tell different things. A file starts
with the line {"file": N}, N rising by one with each rotation, so that a reader can go on where it stopped:
a cursor is "N:OFFSET". Written through the background writer; read by the HTTP layer. Imports no ray and no torch.
"""

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorafleet_runtime.loop.writer import BackgroundWriter

ROTATE_BYTES = 1 << 20
_MOST_CHARACTERS = 16_384
_MOST_RUNS = 4096
_LOGGER = "lorafleet_runtime"


def about(uid: str, **figures: Any) -> dict[str, Any]:
    """`extra` of a log call that belongs to a run.

    Args:
        uid: the run.
        figures: JSON values kept beside the message, as step or reward; `detail` is more text, as a traceback.
    """
    return {"run": {"uid": uid, **figures}}


class Journal(logging.Handler):
    """Writes records about runs into their files.

    Args:
        writer: does the writing.
        locate: a run's directory by uid; None for one that is not known.
    """

    def __init__(self, writer: BackgroundWriter, locate: Callable[[str], Path | None]) -> None:
        super().__init__(logging.INFO)
        self._writer = writer
        self._locate = locate
        self._last: OrderedDict[str, str] = OrderedDict()
        """Newest message by uid: what is tried again and again is told once."""

    def install(self) -> None:
        """Listen to the runtime's loggers."""
        logger = logging.getLogger(_LOGGER)
        logger.addHandler(self)
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)

    def remove(self) -> None:
        """Stop listening."""
        logging.getLogger(_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record about a run to the writer."""
        try:
            self._take(record)
        except Exception:  # noqa: BLE001 (a log call must not fail the work that it tells of)
            self.handleError(record)  # prints the traceback

    def _take(self, record: logging.LogRecord) -> None:
        run: dict[str, Any] | None = getattr(record, "run", None)
        directory = None if run is None else self._locate(run["uid"])
        if run is None or directory is None:
            return
        message = record.getMessage().removeprefix(f"run {run['uid']}").lstrip(": ")
        if self._repeats(run["uid"], message):
            return
        entry = {"time": record.created, "level": record.levelname, "message": message}
        entry |= {key: value for key, value in run.items() if key != "uid" and value not in (None, "")}
        if record.exc_info and "detail" not in entry:
            entry["detail"] = logging.Formatter().formatException(record.exc_info)
        for key in ("message", "detail"):
            if key in entry:
                text = str(entry[key])[-_MOST_CHARACTERS:]
                entry[key] = text.encode(errors="replace").decode()  # a lone surrogate would not go through HTTP
        for key, value in entry.items():
            if isinstance(value, float) and not math.isfinite(value):
                entry[key] = str(value)  # JSON has no word for it
        line = json.dumps(entry, default=str)
        self._writer.submit(lambda: append(directory, line))

    def _repeats(self, uid: str, message: str) -> bool:
        repeats = self._last.pop(uid, None) == message
        self._last[uid] = message
        while len(self._last) > _MOST_RUNS:
            self._last.popitem(last=False)
        return repeats


def append(directory: Path, line: str) -> None:
    """Add one line to a run's log; starts a new file when this one is full.

    Raises:
        OSError: the storage refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "log.jsonl"
    number = 1
    if path.exists() and path.stat().st_size >= ROTATE_BYTES:
        number = _number(path) + 1
        path.replace(directory / "log.1.jsonl")
    with path.open("ab+") as file:
        if file.tell() == 0:
            file.write(json.dumps({"file": number}).encode() + b"\n")
        else:
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # a crash cut the last line
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def read_log(directory: Path, after: str | None) -> tuple[list[dict[str, Any]], str]:
    """A run's entries behind a cursor (all of them when None or not known any more), and the next cursor."""
    current, before = directory / "log.jsonl", directory / "log.1.jsonl"
    seen, stopped = _cursor(after)
    number = -1
    while number != (number := _number(current)):  # again when it was rotated under our hands
        entries: list[dict[str, Any]] = []
        offset = stopped
        if seen != number:
            entries, _ = _entries(before, stopped if seen == number - 1 else 0)
            offset = 0
        newest, end = _entries(current, offset)
    return entries + newest, f"{number}:{end}"


def _cursor(text: str | None) -> tuple[int, int]:
    number, _, offset = (text or "-1:0").partition(":")
    return int(number), int(offset)


def _number(path: Path) -> int:
    """The number in a file's first line; 0 where there is no file, 1 where the line is damaged."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return 0
    try:
        return int(json.loads(first)["file"])
    except (ValueError, KeyError, TypeError):
        return 1


def _entries(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines from `offset` on, and where the next one will begin."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    entries = []
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the line that a crash cut
            continue
        if "message" in entry:
            entries.append(entry)
    return entries, offset + len(whole)
