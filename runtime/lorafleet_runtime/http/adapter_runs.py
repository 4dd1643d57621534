"""miles' /adapter_runs routes, for users of miles: same meanings and codes, without the operator.

A POST without a free slot is 409: only operator-owned runs queue. Names are checked whole, so a trailing newline or a
run called `state` is refused.
"""

import re
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from starlette.exceptions import HTTPException

from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.registry.admission import SpecProblem
from lorafleet_runtime.registry.run import TERMINAL, Run

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NAMESPACE = "api"
_RESERVED = frozenset({".", "..", "state"})
_STATES = {"QUEUED": "PENDING", "FAILED": "COMPLETED", "SUSPENDED": "COMPLETED"}
"""Our states that miles does not have, by the nearest that it has."""


class PostRun(BaseModel):
    """Body of POST /adapter_runs: exactly one of config and yaml_path."""

    model_config = ConfigDict(extra="forbid")
    name: str
    config: dict[str, Any] | None = None
    yaml_path: str | None = None


def adapter_runs_router(view: FleetView) -> APIRouter:
    """The routes over one registry."""
    router = APIRouter(prefix="/adapter_runs")
    registry = view.registry

    def find(name: str) -> Run:
        mine = [r for r in registry.runs.values() if r.owner == "api" and r.name == name]
        if not mine:
            raise HTTPException(404, f"name: {name!r} is not known here")
        return max(mine, key=lambda r: r.created)

    @router.post("")
    async def post(body: PostRun) -> dict[str, Any]:
        """Register a run; it takes a slot at once."""
        if not _NAME.fullmatch(body.name) or body.name in _RESERVED:
            raise HTTPException(400, f"name: {body.name!r} is not usable; use letters, digits, '.', '_' and '-'")
        if any(r.owner == "api" and r.name == body.name and r.state not in TERMINAL for r in registry.runs.values()):
            raise HTTPException(400, f"name: {body.name!r} is live; DELETE it first or choose another name")
        if registry.slots().used + registry.slots().queued >= registry.pool.slots:
            raise HTTPException(409, f"slots: all {registry.pool.slots} are taken; try again when one is free")
        spec = {to_camel(k): v for k, v in _read(body).items()} | {"poolRef": {"name": "api"}}
        uid = str(uuid.uuid4())
        try:
            registry.put(
                uid, spec, namespace=_NAMESPACE, name=body.name, generation=1, created=time.time(), owner="api"
            )
        except SpecProblem as error:
            raise HTTPException(400, str(error)) from error
        return {"name": body.name, "slot": registry.runs[uid].slot}

    @router.get("")
    async def list_runs() -> dict[str, Any]:
        """Every API-owned run."""
        return {"adapters": [_status(r) for r in registry.runs.values() if r.owner == "api"]}

    @router.get("/state")
    async def states(names: Annotated[list[str], Query()]) -> dict[str, Any]:
        """The states of some runs; null for unknown ones."""
        known = {r.name: r for r in sorted(registry.runs.values(), key=lambda r: r.created) if r.owner == "api"}
        return {"states": {n: _state(known[n]) if n in known else None for n in names}}

    @router.get("/{name}")
    async def get(name: str) -> dict[str, Any]:
        """One run, flat."""
        return _status(find(name))

    @router.delete("/{name}")
    async def delete(name: str) -> dict[str, str]:
        """Mark a run for retirement; the record of a finished one stays."""
        run = find(name)
        if run.state not in TERMINAL:
            registry.retire(run.uid, "Cancelled", "Cancelled", "deleted through /adapter_runs", save=True)
        return {"status": "ok", "name": name}

    return router


def _read(body: PostRun) -> dict[str, Any]:
    if (body.config is None) == (body.yaml_path is None):
        raise HTTPException(400, "config, yaml_path: send exactly one")
    if body.config is not None:
        return body.config
    try:
        loaded = yaml.safe_load(Path(str(body.yaml_path)).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise HTTPException(400, f"yaml_path: {body.yaml_path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise HTTPException(400, f"yaml_path: {body.yaml_path} holds no mapping; write the run's fields as a mapping")
    return loaded


def _state(run: Run) -> str:
    return _STATES.get(run.state, run.state)


def _status(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "slot": run.slot,
        "state": _state(run),
        "version": None if run.state in TERMINAL else run.weight_version,
        "step": run.step,
        "accumulated_groups": run.accumulated_groups,
        "registration_id": run.uid,
        "error": run.message if run.state == "FAILED" else None,
        **run.spec.model_dump(mode="json", exclude={"pool_ref"}),
    }
