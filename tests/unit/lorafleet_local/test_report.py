"""What is said to a terminal that is gone does not keep its sayer from its work."""

import os

import pytest
from rich.console import Console

from lorafleet_local.report import Reporter


def test_a_dead_terminal_is_talked_to_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        reporter = Reporter()
        assert reporter.console.is_terminal
        with reporter.phase("work"):
            reporter.say("begun")
            os.close(master)
            reporter.waiting("the end")
            reporter.say("stopping")
        reporter.console.print("done")
        with pytest.raises(OSError, match="Input/output error"):
            Console(file=terminal).print("rich alone does not bear it")
        monkeypatch.undo()
        reporter.console.file.flush()
        _drop(terminal)
    assert reporter.phases.keys() == {"work"}


def _drop(terminal: object) -> None:
    """Take the text that could not be written out of its buffer: closing would try again."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, terminal.fileno())  # type: ignore[attr-defined]
    os.close(fd)
