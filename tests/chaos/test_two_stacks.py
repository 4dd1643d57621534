"""Two stacks on one machine, as of two checkouts: each trains its own run, neither sees the other, one goes alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from lorafleet_local import stack
from lorafleet_local.processes import find, members
from lorafleet_local.report import Reporter
from support.chaos import Chaos
from support.cluster import Cluster
from support.tiny_stack import tiny_stack

INIT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, _node_ip_address='127.0.0.2'); print('in')"


@pytest.fixture
def cluster(chaos: Chaos) -> Iterator[Cluster]:
    """The stack of all scenarios, and beside it the test's own; without runs afterwards."""
    yield chaos.cluster
    chaos.cluster.kubectl("delete", "adapterruns", "--all", "--timeout=90s", timeout=100.0)


def test_two_stacks_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    with tiny_stack(tmp_path) as other:
        both = (cluster, other)
        ports = [set(c.stack.state.ports.values()) for c in both]
        assert not ports[0] & ports[1]
        assert len(set(map(ray_address, both))) == 2
        for c in both:
            c.apply("same-name", numStep=4, customRmPath="support.rewards.slow")
        uids = [c.wait_step("same-name", 1) for c in both]
        assert [[view.uid for view in c.listing().adapters] for c in both] == [[uid] for uid in uids]
        assert token_of(other, cluster).status_code == httpx.codes.UNAUTHORIZED
        assert joins_ray(cluster, cluster)
        assert not joins_ray(other, cluster), "the token of one Ray head opens the other's"

        stack.down(other.stack.state.folder, Reporter())
        assert members(other.stack.state.stack_id, other.stack.state.processes) == []
        assert all(find(process) is not None for process in cluster.stack.state.processes)
        cluster.wait("same-name", "Complete")
        assert cluster.get("same-name")["status"]["step"] == 4


def token_of(one: Cluster, another: Cluster) -> httpx.Response:
    """What a stack answers to the token of another one."""
    token = one.stack.token_file.read_text().strip()
    url = f"{another.stack.runtime_url}/v1/pool"
    return httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)


def serve(cluster: Cluster) -> psutil.Process:
    """The stack's runtime process."""
    found = members(cluster.stack.state.stack_id, cluster.stack.state.processes)
    [process] = [p for p in found if "serve" in p.cmdline() and "lorafleet_local.supervise" not in p.cmdline()]
    return process


def ray_address(cluster: Cluster) -> str:
    """Where its Ray head listens."""
    argv: list[str] = serve(cluster).cmdline()
    return argv[argv.index("--ray-address") + 1]


def joins_ray(with_token_of: Cluster, head_of: Cluster) -> bool:
    """Whether the Ray token of one stack opens the Ray head of another."""
    token = {name: value for name, value in serve(with_token_of).environ().items() if name.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", INIT, ray_address(head_of)]
    try:
        done = subprocess.run(command, env={**os.environ, **token}, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:  # Ray goes on trying for a minute where it is refused
        return False
    return done.stdout.strip() == "in"
