"""miles' /adapter_runs routes, for users of miles: same meanings and codes, without the operator.

What is the same and what differs: docs/adapter_runs.md. Rules and files are `loop/api_runs.py`'s; here are only bodies
and codes.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from lorafleet_runtime.loop.api_runs import ApiRuns, Refused
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.storage import inside

_STATES = {"QUEUED": "PENDING", "FAILED": "COMPLETED", "SUSPENDED": "COMPLETED"}
"""Our states that miles does not have, by the nearest that it has."""

_MAX_YAML_BYTES = 1 << 20

SWITCHED_OFF = "adapter_runs: these routes are off; set adapterRunsApi: true in the runtime's configuration, restart it"


class PostRun(BaseModel):
    """Body of POST /adapter_runs: exactly one of config and yaml_path."""

    model_config = ConfigDict(extra="forbid")
    name: str
    config: dict[str, Any] | None = None
    yaml_path: str | None = None


def switched_off_router() -> APIRouter:
    """Says how the routes are switched on."""
    router = APIRouter()

    async def off() -> None:
        """Always 404."""
        raise HTTPException(404, SWITCHED_OFF)

    for path in ("/adapter_runs", "/adapter_runs/{rest:path}"):
        router.add_api_route(path, off, methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    return router


def adapter_runs_router(runs: ApiRuns, storage_root: Path) -> APIRouter:
    """The routes over the API-owned runs."""
    router = APIRouter(prefix="/adapter_runs")

    @router.post("")
    async def post(body: PostRun) -> dict[str, Any]:
        """Register a run; its slot is its own from now on, and its data is checked before it loads."""
        config = await asyncio.to_thread(_config, body, storage_root)
        run = await runs.post(body.name, config)
        return {"name": run.name, "slot": run.slot, "registration_id": run.uid}

    @router.get("")
    async def list_runs() -> dict[str, Any]:
        """Every API-owned run."""
        return {"adapters": [_status(runs, run) for run in runs.runs()]}

    @router.get("/state")
    async def states(names: Annotated[list[str], Query()]) -> dict[str, Any]:
        """The states of some runs; null for unknown ones."""
        found = {name: runs.find(name) for name in names}
        return {"states": {name: None if run is None else _state(run) for name, run in found.items()}}

    @router.get("/{name}")
    async def get(name: str) -> dict[str, Any]:
        """One run, flat."""
        run = runs.find(name)
        if run is None:
            raise Refused(404, "name", name, "is not known here; GET /adapter_runs lists what is")
        return _status(runs, run)

    @router.delete("/{name}")
    async def delete(name: str) -> dict[str, str]:
        """Mark a run for retirement; the record of an ended one stays."""
        run = await runs.retire(name)
        return {"status": "ok", "name": run.name}

    return router


def _config(body: PostRun, root: Path) -> dict[str, Any]:
    if (body.config is None) == (body.yaml_path is None):
        raise Refused(400, "config, yaml_path", None, "send exactly one")
    if body.config is not None:
        return body.config
    given = str(body.yaml_path)
    try:
        path = inside(root, given)  # the file is read by the server: only what lies on the pool's storage is the user's
        if not path.is_file() or path.stat().st_size > _MAX_YAML_BYTES:
            raise ValueError(f"is no file of at most {_MAX_YAML_BYTES >> 20} MiB on the pool's storage; upload one")
        loaded = yaml.load(path.read_text(), Loader=_Plain)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise Refused(400, "yaml_path", given, f"cannot be used: {error}") from error
    if not isinstance(loaded, dict):
        raise Refused(400, "yaml_path", given, "holds no mapping; write the run's fields as a mapping")
    return loaded


class _Plain(yaml.SafeLoader):
    """YAML without aliases, by which a small file can stand for a huge one."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias.

        Raises:
            yaml.YAMLError: this is one.
        """
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read here; write the value out")
        return super().compose_node(parent, index)


def _state(run: Run) -> str:
    return _STATES.get(run.state, run.state)


def _status(runs: ApiRuns, run: Run) -> dict[str, Any]:
    record = runs.record(run)
    fields = run.spec.model_dump(mode="json", exclude={"pool_ref", "sample_metadata"})
    return {
        **fields,
        "metadata": run.spec.sample_metadata or {},
        "save": record.save,
        "alpha": run.spec.lora_alpha,
        "name": run.name,
        "slot": run.slot,
        "state": _state(run),
        "version": None if run.state in TERMINAL else run.weight_version,
        "step": run.step,
        "start_step": run.start_step,
        "target_step": run.target_step,
        "accumulated_groups": run.accumulated_groups,
        "registration_id": run.uid,
        "error": run.ending.message if run.visible_outcome == "Failed" and run.ending is not None else None,
        "artifact": None if run.artifact is None else {"path": run.artifact.path, "step": run.artifact.step},
        "exported_step": record.exported_step,
    }
