"""What a stack remembers between commands: its id, processes, ports and paths, in one JSON file.

Called by `stack`. Written atomically after every process that starts, so that whatever happens, `down` knows it.
"""

import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lorafleet_local.certs import write_private
from lorafleet_local.paths import locked
from lorafleet_local.processes import Process


@dataclass(slots=True)
class State:
    """One stack.

    Args:
        folder: the state folder.
    """

    folder: Path
    stack_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Marks every process of the stack, in its environment."""
    processes: list[Process] = field(default_factory=list)
    """In the order in which they were started."""
    ports: dict[str, int] = field(default_factory=dict)
    """By name; kept over restarts where they are still free, so that a kubeconfig stays true."""
    ray_temp_dir: str | None = None
    """Under /tmp, because Unix socket paths end at 107 bytes."""
    ready: bool = False
    """`up` finished."""

    @classmethod
    def load(cls, folder: Path) -> "State":
        """The state in `folder`, or a new one."""
        try:
            raw = json.loads((folder / "state.json").read_text())
        except FileNotFoundError:
            return cls(folder)
        processes = [Process(**process) for process in raw.pop("processes")]
        return cls(folder=folder, processes=processes, **raw)

    def save(self) -> None:
        """Write the state file, readable by its owner only."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        raw = asdict(self)
        del raw["folder"]
        write_private(self.folder / "state.json", json.dumps(raw, indent=2).encode() + b"\n")

    def add(self, process: Process) -> Process:
        """Remember a process that was just started."""
        self.processes.append(process)
        self.save()
        return process

    def process(self, name: str) -> Process | None:
        """The process of that name."""
        return next((process for process in self.processes if process.name == name), None)

    def log(self, name: str) -> Path:
        """The log file of a part."""
        return self.folder / "log" / f"{name}.log"

    def port(self, name: str) -> int:
        """The port of that name: the one used before where it is free, else a new one."""
        self.ports[name] = free_port(self.ports.get(name, 0))
        return self.ports[name]


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep two commands from changing the same stack at once."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder / "lock"):
        yield


def free_port(preferred: int = 0) -> int:
    """A free TCP port of 127.0.0.1: `preferred` if nobody has it."""
    for candidate in (preferred, 0):
        with socket.socket() as probe:
            # As servers do: a port that only lingers in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no free port on 127.0.0.1 (pid {os.getpid()})")
