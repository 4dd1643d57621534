"""What a stack remembers between commands: its id, processes, ports and paths, in one JSON file.

Called by `stack` and `guardian`. Written atomically after every process that starts, so that whatever happens, `down`
knows it. The stack's id follows from the folder, so that even without the file its processes are found.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lorafleet_local.certs import write_private
from lorafleet_local.paths import locked
from lorafleet_local.ports import reserve
from lorafleet_local.processes import Process, find


@dataclass(slots=True)
class State:
    """One stack.

    Args:
        folder: the state folder.
    """

    folder: Path
    stack_id: str = ""
    """Marks every process of the stack, in its environment."""
    home: str = ""
    """Where the folder is; a copy of the folder is elsewhere and owns none of the processes."""
    processes: list[Process] = field(default_factory=list)
    """In the order in which they were started."""
    ports: dict[str, int] = field(default_factory=dict)
    """By name; kept over restarts where they are still free, so that a kubeconfig stays true."""
    ready: bool = False
    """`up` finished."""
    owner: Process | None = None
    """The command that the stack ends with: a demo, or `up` until it is done."""

    def __post_init__(self) -> None:
        self.home = self.home or str(self.folder.resolve())
        if not self.stack_id:
            self.renew_id()

    def renew_id(self) -> None:
        """Let the id follow from where the folder is now; for when no process carries the old one.

        A folder that was moved would otherwise share its id with the next one at its old place.
        """
        self.stack_id = hashlib.sha256(f"{os.getuid()}:{self.home}".encode()).hexdigest()[:32]

    @classmethod
    def load(cls, folder: Path) -> "State":
        """The state in `folder`; a new one where there is none that can be read, or that of another folder."""
        try:
            raw = json.loads((folder / "state.json").read_text())
            state = cls(folder, raw["stack_id"], raw.get("home", ""), ports=raw["ports"], ready=raw["ready"])
            state.processes = [Process(**process) for process in raw["processes"]]
            state.owner = Process(**raw["owner"]) if raw.get("owner") else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(folder)
        here = str(folder.resolve())
        if state.home != here and Path(state.home).exists():
            return cls(folder)
        state.home = here  # moved: its processes came along
        if not any(find(process) is not None for process in state.processes):
            state.renew_id()
        return state

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
        self.ports[name] = reserve(self.folder, self.ports.get(name, 0), self.ports.values())
        return self.ports[name]


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep two commands from changing the same stack at once."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder / "lock"):
        yield
