"""One Ray for all tests of a session that need real actors; a process can only have one."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """A Ray without CPUs: actors that ask for none are placed all the same."""
    home = Path(tempfile.mkdtemp(prefix="lft"))  # short: Ray puts sockets below it
    options = {"num_cpus": 0, "object_store_memory": 512 << 20, "include_dashboard": False, "log_to_driver": False}
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's spelling); a nice actor starves beside its tests
    try:
        ray.init(**options, _temp_dir=str(home))
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(home, ignore_errors=True)
