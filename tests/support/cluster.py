"""What the cluster tests do to a running stack: apply runs, wait for states, look into the runtime, kill parts."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from lorafleet_api.v1alpha1.wire import AdapterList, AdapterView
from lorafleet_local.kubectl import Kubectl
from lorafleet_local.processes import members, wait_until
from lorafleet_local.stack import Stack

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Cluster:
    """A stack and a client of its runtime."""

    stack: Stack
    runtime: httpx.Client

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as the administrator."""
        return self.stack.kubectl

    def apply(self, name: str, **spec: Any) -> None:
        """Apply an AdapterRun of two groups of four samples a step."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest(name, **spec)))

    def get(self, name: str) -> dict[str, Any]:
        """The object."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "adapterrun", name, "-o", "json"))
        return found

    def uid(self, name: str) -> str:
        """The object's uid."""
        return str(self.get(name)["metadata"]["uid"])

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """One condition; status Unknown before it exists."""
        conditions = self.get(name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {"status": "Unknown", "reason": "", "message": ""})

    def wait(self, name: str, condition: str, seconds: int = 90) -> None:
        """kubectl wait, as a user does."""
        target = (f"adapterrun/{name}", f"--for=condition={condition}", f"--timeout={seconds}s")
        self.kubectl("wait", *target, timeout=seconds + 10.0)

    def listing(self) -> AdapterList:
        """What the runtime holds."""
        answer = self.runtime.get("/v1/adapters", params={"timeout": 0})
        answer.raise_for_status()
        return AdapterList.model_validate(answer.json())

    def view(self, uid: str) -> AdapterView | None:
        """The runtime's view of a run; None while the runtime is away or does not know it."""
        try:
            return next((a for a in self.listing().adapters if a.uid == uid), None)
        except httpx.HTTPError:
            return None

    def until(self, what: str, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        """Wait for something that no event tells."""
        wait_until(what, condition, seconds, poll_seconds=_POLL_SECONDS)

    def wait_step(self, name: str, step: int, seconds: float = 90.0) -> str:
        """Wait until the runtime has done this many steps; returns the uid."""
        uid = self.uid(name)
        self.until(f"step {step} of {name}", lambda: (v := self.view(uid)) is not None and v.step >= step, seconds)
        return uid

    def traces(self, uid: str) -> list[str]:
        """Everything in trainer and engines that belongs to the run, by their own listings."""
        listing = self.listing()
        found = [f"trainer slot {slot}" for slot, held in listing.trainer.slots.items() if held == uid]
        return found + [a for e in listing.engines for a in e.adapters if a.startswith(f"{uid}@")]

    def kill(self, title: str) -> int:
        """SIGKILL the one process of this stack whose command line contains `title`; returns its pid."""
        lines = {p: _command_line(p) for p in self._processes()}
        found = [p for p, line in lines.items() if title in line and "lorafleet_local.supervise" not in line]
        assert len(found) == 1, f"{title}: {found}"
        os.kill(found[0].pid, signal.SIGKILL)
        return int(found[0].pid)

    def _processes(self) -> list[psutil.Process]:
        return members(self.stack.state.stack_id, self.stack.state.processes)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a short-lived child that ended since it was listed
        return ""


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """An AdapterRun that trains in seconds."""
    base: dict[str, Any] = {
        "poolRef": {"name": "demo"},
        "rank": 4,
        "data": "train.jsonl",
        "inputKey": "prompt",
        "labelKey": "label",
        "customRmPath": "support.rewards.spread",
        "rolloutBatchSize": 2,
        "nSamplesPerPrompt": 4,
        "numStep": 3,
        "maxStaleness": 0,
        "sampling": {"maxTokens": 6},
        "optimizer": {"lr": 0.001},
        "checkpoint": {"intervalSteps": 2},
    }
    return {
        "apiVersion": "lorafleet.dev/v1alpha1",
        "kind": "AdapterRun",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {k: v for k, v in (base | spec).items() if v is not None},
    }
