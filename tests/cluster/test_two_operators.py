"""A second operator started by mistake: it stands by; it takes over from one that hangs, which is then fenced."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorafleet_local.processes import find
from support.cluster import Cluster


@dataclass
class Second:
    """The operator that somebody started by hand."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def says(self, text: str) -> bool:
        """Whether its log has this text."""
        assert self.process.poll() is None, self.log.read_text()
        return text in self.log.read_text()


@pytest.fixture
def second(cluster: Cluster, tmp_path: Path) -> Iterator[Second]:
    """A second operator with the same rights, for all namespaces as the stack's own."""
    log = tmp_path / "second.log"
    kubeconfig = cluster.stack.state.folder / "operator.kubeconfig"
    command = [str(Path(sys.executable).with_name("lorafleet-operator")), "--kubeconfig", str(kubeconfig)]
    command += ["--all-namespaces", "--metrics-port=0", "--health-port=0", "--identity=second"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | {"LORAFLEET_PROGRESS_SECONDS": "0.2"})
    yield Second(process, log)
    process.terminate()
    process.wait(20)


def first_operator(cluster: Cluster) -> int:
    """Pid of the stack's operator, below its supervisor."""
    [record] = [p for p in cluster.stack.state.processes if p.name == "operator"]
    supervisor = find(record)
    assert supervisor is not None
    return int(psutil.Process(supervisor.pid).children()[0].pid)


def holder(cluster: Cluster) -> str:
    """Who holds the lease."""
    return cluster.kubectl(
        "get", "lease", "lorafleet-operator", "--namespace=lorafleet-system", "-o", "jsonpath={.spec.holderIdentity}"
    )


def epoch(cluster: Cluster) -> int:
    """The operatorEpoch that the runtime obeys."""
    return cluster.listing().operator_epoch


def test_second_operator_stands_by_takes_over_from_a_hanging_one_and_fences_it(
    cluster: Cluster, second: Second
) -> None:
    cluster.until("the second stands by", lambda: second.says("standing by while stack-"), 30)
    before = epoch(cluster)
    cluster.apply("watched", numStep=60, customRmPath="support.rewards.slow")
    uid = cluster.wait_step("watched", 2)
    assert (epoch(cluster), holder(cluster).startswith("stack-")) == (before, True)

    hanging = first_operator(cluster)
    os.kill(hanging, signal.SIGSTOP)
    cluster.until("the second takes over", lambda: epoch(cluster) == before + 1, 60)
    assert holder(cluster) == "second"
    assert condition(cluster, "Registered") == ("True", "Training")
    os.kill(hanging, signal.SIGCONT)
    cluster.until("the first ends", lambda: not psutil.pid_exists(hanging), 30)
    log = cluster.stack.state.log("operator").read_text()
    assert len([line for line in log.splitlines() if "ending: fenced: another operator works here" in line]) == 1
    assert "ended with 3" in log
    assert condition(cluster, "Registered") == ("True", "Training")

    cluster.wait_step("watched", int(cluster.get("watched")["status"].get("step", 0)) + 2)
    assert (epoch(cluster), second.process.poll()) == (before + 1, None)  # the restarted first one stands by
    view = cluster.view(uid)
    assert view is not None
    assert (view.restarts, view.start_step) == (0, 0)

    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(20) == 0
    cluster.until("the first works again", lambda: epoch(cluster) == before + 2, 30)
    cluster.kubectl("patch", "adapterrun", "watched", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    cluster.wait("watched", "Deregistered", 60)


def condition(cluster: Cluster, kind: str) -> tuple[Any, Any]:
    """Status and reason of the watched run's condition."""
    found = cluster.condition("watched", kind)
    return found["status"], found["reason"]
