"""An engine actor that is killed leaves vLLM's process behind; its listed pids are enough to end it. Runs last."""

import os
import signal

import psutil
import pytest
import ray

from lorafleet_runtime.engines.actor import find_engine
from lorafleet_runtime.engines.reap import reap
from support.engine_actor import EngineUnderTest


def test_a_killed_engine_is_reaped_by_its_listed_pids(shared_engine: EngineUnderTest) -> None:
    ray.get(shared_engine.actor.probe.remote())
    status = shared_engine.status()
    assert find_engine("engine-test") is not None
    actor, *children = status.pids
    assert children, "vLLM's process is missing in the listing"
    os.kill(actor, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        shared_engine.status()
    reap(status.pids, status.listed_at)
    assert not [pid for pid in status.pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
