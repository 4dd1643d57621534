"""The one-machine stack: control plane, runtime and operator, brought up, looked at and taken down.

    up():  runtime (slow; started first, waited for last)
           control plane -> CRDs, RBAC, Secret -> operator -> AdapterPool -> wait for Ready
    down(): operator and runtime -> controller manager -> API server -> etcd -> whatever still carries the stack's id

Called by `main`, `guardian`, the demos and the cluster tests. A failed or interrupted `up` takes everything down again.
"""

import json
import os
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from lorafleet_api.v1alpha1.wire import AdapterList, PoolView
from lorafleet_local import pool
from lorafleet_local.api import Api, condition
from lorafleet_local.binaries import BinaryError, find_binaries
from lorafleet_local.certs import write_private
from lorafleet_local.controlplane import ControlPlane, start_control_plane
from lorafleet_local.kubectl import Kubectl, KubectlError, find_kubectl
from lorafleet_local.model import ModelError, ensure_model
from lorafleet_local.paths import repo_root
from lorafleet_local.processes import (
    STACK_ENV,
    Process,
    StartError,
    find,
    last_error,
    log_tail,
    members,
    start,
    wait_until,
)
from lorafleet_local.report import Reporter
from lorafleet_local.state import State, exclusive
from lorafleet_local.supervise import supervised
from lorafleet_local.takedown import make_ray_temp_dir, take_down

START_ERRORS = (StartError, KubectlError, BinaryError, ModelError)
"""What `up` raises for reasons that a user can act on."""
_POOL_READY_SECONDS = 300.0
_APPLY_SECONDS = 60.0
_OWNER_SECONDS = 120.0
"""A command that was told to end takes its stack down first."""
_KILL_SECONDS = 10.0


__all__ = [
    "START_ERRORS",
    "Stack",
    "disown",
    "down",
    "down_if_owned",
    "find_kubectl",
    "is_down",
    "load",
    "status",
    "up",
]


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack."""

    state: State
    kubeconfig: Path
    apiserver_url: str
    runtime_url: str
    storage: Path
    token_file: Path

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as the administrator of this cluster."""
        return Kubectl(self.kubeconfig, self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Marks a process that acts on this stack, so that `down` ends it too."""
        return {STACK_ENV: self.state.stack_id}

    def pool_spec(self) -> pool.Document:
        """The AdapterPool spec that it runs with."""
        found: pool.Document = json.loads((self.state.folder / "runtime.yaml").read_text())["pool"]["spec"]
        return found

    def runtime(self) -> httpx.Client:
        """A client of the runtime's HTTP API."""
        headers = {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        return httpx.Client(base_url=self.runtime_url, headers=headers, trust_env=False, timeout=10.0)

    def api(self) -> Api:
        """A reading client of this cluster."""
        return Api(self.apiserver_url, self.state.folder)


def up(
    folder: Path,
    reporter: Reporter,
    spec: pool.Document | None = None,
    progress_seconds: float = 2.0,
    owner: Process | None = None,
) -> Stack:
    """Bring the stack up; a stack that is already up is left alone.

    Args:
        folder: state folder.
        reporter: told what is done and what is waited for.
        spec: AdapterPool spec without `endpoint`; the demo's when None. Its storage must be FOLDER/storage.
        progress_seconds: least time between two progress writes of the operator for one run.
        owner: the stack ends with this process, until `disown`; for its guardian.

    Raises:
        StartError: a part did not come up (the message ends with its log), or another pool is already up.
        KubectlError: an object could not be applied.
    """
    with exclusive(folder):
        state = State.load(folder)
        if state.ready and all(find(process) is not None for process in state.processes):
            running = _stack(state)
            if spec is not None and spec != running.pool_spec():
                raise StartError("the stack is up with another pool; run `make down`, then `make up` again")
            reporter.say("the stack is already up")
            return running
        take_down(state, reporter)
        state.owner = owner
        state.save()
        try:
            spec = spec or pool.pool_spec(ensure_model(), folder / "storage")
            return _bring_up(state, reporter, spec, progress_seconds)
        except BaseException:
            reporter.say("start failed or interrupted: stopping what was started")
            take_down(state, reporter)
            raise


def down(folder: Path, reporter: Reporter) -> bool:
    """Stop every process of the stack; objects, checkpoints and logs stay. False when nothing lived.

    A command that is bringing it up, or a demo, is told to end first; it takes its stack down itself.
    """
    owner = State.load(folder).owner
    ended = owner is not None and owner.pid != os.getpid() and _end_owner(owner, reporter)
    with exclusive(folder):
        return take_down(State.load(folder), reporter) or ended


def _end_owner(owner: Process, reporter: Reporter) -> bool:
    command = find(owner)
    if command is None:
        return False
    reporter.say(f"ending the command that runs this stack (pid {owner.pid})")
    with suppress(psutil.NoSuchProcess):
        command.terminate()
        command.resume()  # one that was suspended with Ctrl-Z takes the signal only then
    try:
        wait_until("its end", lambda: find(owner) is None, _OWNER_SECONDS)
    except StartError:
        reporter.say(f"pid {owner.pid} did not end within {_OWNER_SECONDS:.0f} s: killing it")
        with suppress(psutil.NoSuchProcess):
            command.kill()
        wait_until(f"the end of pid {owner.pid} after SIGKILL", lambda: find(owner) is None, _KILL_SECONDS)
    return True


def is_down(folder: Path) -> bool:
    """Whether no process of the stack lives, recorded or not."""
    state = State.load(folder)
    return not members(state.stack_id, state.processes)


def down_if_owned(folder: Path, owner: Process, reporter: Reporter) -> None:
    """Stop the stack if it still belongs to `owner`, which is gone; for the guardian."""
    with exclusive(folder):
        state = State.load(folder)
        if state.owner == owner:
            take_down(state, reporter)
            _disown(state)


def disown(folder: Path, owner: Process) -> None:
    """The stack of `owner` no longer ends with it."""
    with exclusive(folder):
        state = State.load(folder)
        if state.owner == owner:
            _disown(state)


def _disown(state: State) -> None:
    state.owner = None
    state.save()


def status(folder: Path) -> dict[str, bool]:
    """Which processes of the stack live, by name."""
    return {process.name: find(process) is not None for process in State.load(folder).processes}


def load(folder: Path) -> Stack | None:
    """The stack in `folder` if it is up."""
    state = State.load(folder)
    alive = state.ready and all(find(process) is not None for process in state.processes)
    return _stack(state) if alive else None


def _stack(state: State) -> Stack:
    return Stack(
        state=state,
        kubeconfig=state.folder / "kubeconfig",
        apiserver_url=f"https://127.0.0.1:{state.ports['apiserver']}",
        runtime_url=f"http://127.0.0.1:{state.ports['runtime']}",
        storage=state.folder / "storage",
        token_file=state.folder / "token",
    )


def _bring_up(state: State, reporter: Reporter, spec: pool.Document, progress_seconds: float) -> Stack:
    binaries = find_binaries()
    with reporter.phase("runtime start"):
        runtime = _start_runtime(state, spec)
    reporter.say("runtime: started (Ray, trainer and engine load in the background)")
    with reporter.phase("control plane"):
        plane = start_control_plane(state, binaries)
    reporter.say(f"control plane: ready at {plane.url}")
    stack = _stack(state)
    with reporter.phase("objects"):
        _apply_base(stack.kubectl)
        _apply(stack.kubectl, pool.token_secret(stack.token_file.read_text().strip()))
        operator = _start_operator(state, plane, progress_seconds)
        _apply(stack.kubectl, pool.pool_manifest(spec, stack.runtime_url))
    reporter.say("objects: CRDs, RBAC, token Secret and AdapterPool applied; operator: started")
    with reporter.phase("pool ready"):
        _wait_pool_ready(stack, (runtime, operator), reporter)
    reporter.say(f"AdapterPool {pool.POOL_NAME}: Ready")
    with reporter.phase("trainer and engine ready"):
        _wait_warm(stack, runtime, reporter)
    reporter.say("trainer and engine: ready")
    state.ready = True
    state.save()
    return stack


def _start_runtime(state: State, spec: pool.Document) -> Process:
    folder = state.folder
    (folder / "storage").mkdir(exist_ok=True)
    if not (folder / "token").is_file():
        write_private(folder / "token", secrets.token_urlsafe(32).encode() + b"\n")
    ray_temp_dir = make_ray_temp_dir(state)
    config = pool.runtime_config(spec, state.port("runtime"), folder, ray_temp_dir)
    state.save()
    path = folder / "runtime.yaml"  # JSON is YAML
    write_private(path, json.dumps(config, indent=2).encode() + b"\n")
    # There is no other node that could take over: Ray's default would wait 30 s for actors that never leave.
    # TMPDIR: what Ray, vLLM and the engines leave there goes away with the folder.
    env = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "TMPDIR": ray_temp_dir}
    return _supervised(state, "runtime", [_script("lorafleet-runtime"), "head", "--config", str(path)], env)


def _start_operator(state: State, plane: ControlPlane, progress_seconds: float) -> Process:
    argv = [
        _script("lorafleet-operator"),
        "--kubeconfig", str(plane.operator_kubeconfig),
        "--all-namespaces",
        "--host", "127.0.0.1",
        "--metrics-port", str(state.port("operator-metrics")),
        "--health-port", str(state.port("operator-health")),
    ]  # fmt: skip
    env = {
        "LORAFLEET_PROGRESS_SECONDS": f"{progress_seconds:g}",
        "LORAFLEET_IDENTITY": f"stack-{state.stack_id}",  # started again by its supervisor, it need not wait
    }
    return _supervised(state, "operator", argv, env)


def _supervised(state: State, name: str, argv: list[str], env: dict[str, str] | None = None) -> Process:
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "NO_PROXY": ",".join(filter(None, ["127.0.0.1,localhost", os.environ.get("NO_PROXY")])),
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    return state.add(start(name, supervised(name, argv), state.log(name), state.stack_id, environment))


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _apply_base(kubectl: Kubectl) -> None:
    base = repo_root() / "manifests" / "base"
    crds = base / "crds"
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crds))

    def established() -> bool:
        try:
            kubectl("wait", "--for=condition=Established", "--timeout=10s", "-f", str(crds))
        except KubectlError:  # it can fail at once while a new CRD has no status yet
            return False
        return True

    wait_until("CRDs established", established, _APPLY_SECONDS)
    documents = pool.base_documents(sorted(base.glob("*.yaml")))
    if documents:
        _apply(kubectl, {"apiVersion": "v1", "kind": "List", "items": documents})


def _apply(kubectl: Kubectl, document: pool.Document) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))


def _wait_pool_ready(stack: Stack, processes: tuple[Process, ...], reporter: Reporter) -> None:
    api, runtime = stack.api(), stack.runtime()

    def ready() -> bool:
        for process in processes:
            if find(process) is None:
                raise StartError(f"the {process.name} ended\n{log_tail(process.log)}")
        try:
            found = _pool_ready(api, runtime)
        except httpx.HTTPError as error:
            found = {"status": "Unknown", "reason": type(error).__name__, "message": str(error)}
        newest = last_error(processes[0].log)
        hint = f"; the runtime's log: {newest}" if newest else ""
        reporter.waiting(f"AdapterPool Ready: {found['status']} ({found['reason']}) {found.get('message', '')}{hint}")
        return bool(found["status"] == "True")

    try:
        wait_until(f"AdapterPool {pool.POOL_NAME} Ready", ready, _POOL_READY_SECONDS, poll_seconds=0.25)
    except StartError as error:
        if any(find(process) is None for process in processes):
            raise  # its log is in the message
        tails = "\n".join(f"{process.name}:\n{log_tail(process.log)}" for process in processes)
        raise StartError(f"{error}\n{tails}") from error
    finally:
        api.close()
        runtime.close()


def _pool_ready(api: Api, runtime: httpx.Client) -> dict[str, Any]:
    """The pool's condition Ready, as far as it speaks of this start: the object outlives a stop."""
    item = api.get("adapterpools", pool.POOL_NAME, pool.NAMESPACE)
    found = condition(item, "Ready")
    if found["status"] != "True" or item is None:
        return found
    view = PoolView.model_validate(runtime.get("/v1/pool").raise_for_status().json())
    if (item["status"].get("bootEpoch"), item["status"].get("operatorEpoch")) == (view.boot_epoch, view.operator_epoch):
        return found
    return {"status": "Unknown", "reason": "Pending", "message": "the operator has not looked at this start yet"}


def _wait_warm(stack: Stack, runtime: Process, reporter: Reporter) -> None:
    """Wait for what the pool's Ready does not promise: that a run would start at once."""

    def warm() -> bool:
        try:
            answer = client.get("/v1/adapters").raise_for_status()
        except httpx.HTTPError as error:
            reporter.waiting(f"the runtime to answer ({type(error).__name__})")
            return False
        found = AdapterList.model_validate(answer.json())
        engines = [engine.ready for engine in found.engines]
        trainer = "ready" if found.trainer.ready else "loading"
        reporter.waiting(f"trainer: {trainer}, engine: {'ready' if engines and all(engines) else 'loading'}")
        return found.trainer.ready and bool(engines) and all(engines)

    with stack.runtime() as client:
        wait_until("trainer and engine ready", warm, _POOL_READY_SECONDS, runtime, poll_seconds=0.25)
