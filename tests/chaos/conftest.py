"""One stack for all chaos scenarios: as for the cluster tests, with eight slots, the seam, and a small storage."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest

from support.chaos import Chaos, Report, Scenario
from support.tiny_stack import TESTS, tiny_stack

STORAGE_MIB = 96
_REPORT = Report()
_HEADER = """# What was killed, when, and how each run ended

Written by `make test-chaos`; docs/chaos.md says what each scenario does and what it demands.
"""


@contextmanager
def _small_filesystem(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={STORAGE_MIB}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(mount)}: {done.stderr.strip()}; run `make test-chaos`, which makes this allowed")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)])  # else it goes with the mount namespace


@pytest.fixture(scope="session")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """The stack; its logs are in the folder that is printed when a test fails."""
    folder = tmp_path_factory.mktemp("chaos")
    seam = folder / "seam"
    seam.mkdir()
    env = {"LORAFLEET_CHAOS_DIR": str(seam)}
    paths = [TESTS / "chaos" / "seam"]
    rollout = {"globalBatchSize": 48, "workers": 1}
    with (
        _small_filesystem(folder / "state" / "storage"),
        tiny_stack(folder, env, paths, slots=8, rollout=rollout) as cluster,
    ):
        made = Chaos(cluster, seam, _REPORT)
        cluster.until("the rollout worker", lambda: len(made.processes("ray::RolloutActor")) == 1)
        made.idle = made.kinds()
        yield made


@pytest.fixture
def scenario(chaos: Chaos, request: pytest.FixtureRequest) -> Iterator[Scenario]:
    """A load of its own for the test."""
    name = request.node.name.removeprefix("test_").partition("[")[0].replace("_", "-")
    made = Scenario(chaos, name)
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it to $CHAOS_LOG if that is set."""
    table = _REPORT.markdown()
    terminalreporter.write_sep("=", "chaos")
    terminalreporter.write(table)
    if target := os.environ.get("CHAOS_LOG"):
        outcomes = {word: len(terminalreporter.stats.get(word, [])) for word in ("passed", "failed", "error")}
        counts = ", ".join(f"{n} {word}" for word, n in outcomes.items() if n or word == "passed")
        Path(target).write_text(f"{_HEADER}\n{counts}, {date.today()}.\n\n{table}")
