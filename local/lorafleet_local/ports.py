"""Ports of 127.0.0.1, each belonging to one state folder, over all checkouts of this user.

Called by `state`. Binding a port proves that it is free now, not that it still is when its server starts: another
checkout may be choosing at the same moment. So a chosen port is written down in the cache, and stays its folder's until
that folder is removed or begins anew.
"""

import json
import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from lorafleet_local.certs import write_private
from lorafleet_local.paths import cache_dir, locked

_RANGE = range(20000, 30000)
"""Below Linux's ephemeral ports (from 32768), which outgoing connections and other programs get at random."""


def reserve(folder: Path, preferred: int = 0, keep: Iterable[int] = ()) -> int:
    """A free port for a server of the stack in `folder`; nobody else gets it.

    Args:
        folder: the state folder.
        preferred: the port that this server had before, or 0.
        keep: ports of the folder's other servers; what else it once had becomes free.

    Raises:
        OSError: every port is taken.
    """
    me = str(folder.resolve())
    register = cache_dir() / "ports.json"
    with locked(register.with_suffix(".lock")):
        mine = {*keep, preferred}
        owners = {
            port: owner
            for port, owner in _read(register).items()
            if (port in mine if owner == me else Path(owner).is_dir())
        }
        candidates = [port for port in random.sample(_RANGE, len(_RANGE)) if port not in owners]
        if preferred and owners.get(preferred, me) == me:
            candidates.insert(0, preferred)
        port = next((port for port in candidates if _is_free(port)), None)
        if port is None:
            raise OSError(f"no free port of 127.0.0.1 in {_RANGE.start}-{_RANGE.stop - 1} (pid {os.getpid()})")
        if port != preferred and owners.get(preferred) == me:
            del owners[preferred]
        write_private(register, json.dumps({**owners, port: me}, indent=1).encode() + b"\n")
        return port


def _read(register: Path) -> dict[int, str]:
    try:
        return {int(port): str(owner) for port, owner in json.loads(register.read_text()).items()}
    except FileNotFoundError:
        return {}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port that only lingers in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
