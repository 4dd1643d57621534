"""The /v1/runs routes: what a run left on storage. Samples, its log, its checkpoints' PEFT files.

Addressed by namespace, name and uid, so that they work for finished runs, and for those that this runtime never knew.
Called by people's tools (the CLI). Reads storage only, in threads; serves nothing outside a run's own directory.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse

from lorafleet_runtime.loop.journal import read_log
from lorafleet_runtime.loop.samples import read_samples, recorded_steps
from lorafleet_runtime.storage import CONFIG_FILE, STATE_FILE, WEIGHTS_FILE, checkpoints, inside, run_directory

SERVED_FILES = (WEIGHTS_FILE, CONFIG_FILE)
"""A servable adapter; optimizer states and cursors stay on the storage."""


class RecordProblem(Exception):
    """Something asked for is not there, or its address is no address."""

    def __init__(self, status: int, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}: {value}: {fix}")
        self.status, self.field, self.value, self.fix = status, field, value, fix


def records_router(root: Path) -> APIRouter:
    """The routes over one storage root."""
    router = APIRouter(prefix="/v1/runs/{namespace}/{name}/{uid}")

    @router.get("/samples")
    async def get_samples(
        namespace: str, name: str, uid: str, step: Annotated[int | None, Query(ge=0)] = None
    ) -> dict[str, Any]:
        """One step's prompt groups; the newest recorded step's without `step`."""
        return await asyncio.to_thread(_samples, _directory(root, namespace, name, uid), step)

    @router.get("/log")
    async def get_log(
        namespace: str, name: str, uid: str, after: Annotated[str | None, Query(pattern=r"^\d{1,9}:\d{1,15}$")] = None
    ) -> dict[str, Any]:
        """The run's log behind the cursor `after`, and the next cursor."""
        directory = _directory(root, namespace, name, uid)
        entries, following = await asyncio.to_thread(read_log, directory, after)
        return {"entries": entries, "next": following}

    @router.get("/artifacts")
    async def get_artifacts(namespace: str, name: str, uid: str) -> dict[str, Any]:
        """Whole checkpoints, oldest first, with their servable files."""
        directory = _directory(root, namespace, name, uid)
        return {"artifacts": await asyncio.to_thread(_artifacts, directory)}

    @router.get("/artifacts/{step}/{file}")
    async def get_file(namespace: str, name: str, uid: str, step: int, file: str) -> FileResponse:
        """One servable file of a whole checkpoint."""
        directory = _directory(root, namespace, name, uid)
        return FileResponse(await asyncio.to_thread(_file, root, directory, step, file))

    return router


def _directory(root: Path, namespace: str, name: str, uid: str) -> Path:
    try:
        return run_directory(root, namespace, name, uid)
    except ValueError as error:
        field, _, fix = str(error).partition(": ")
        raise RecordProblem(422, field, {"namespace": namespace, "name": name, "uid": uid}[field], fix) from error


def _samples(directory: Path, step: int | None) -> dict[str, Any]:
    found = read_samples(directory, step)
    if found is not None:
        return found
    steps = recorded_steps(directory)
    if not steps:
        raise RecordProblem(404, "samples", "none", "no step of this run is recorded yet; wait for its first step")
    raise RecordProblem(
        404, "step", step, f"not reached yet, or its samples are not kept any more; recorded are steps {_ranges(steps)}"
    )


def _ranges(steps: list[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _artifacts(directory: Path) -> list[dict[str, Any]]:
    found = []
    for step, path in checkpoints(directory):
        try:
            about = json.loads((path / STATE_FILE).read_text())["files"]
            files = [{"name": n, "bytes": about[n]["bytes"], "sha256": about[n]["sha256"]} for n in SERVED_FILES]
        except (OSError, ValueError, KeyError, TypeError):  # pruned while we looked
            continue
        found.append({"step": step, "path": str(path), "files": files})
    return found


def _file(root: Path, directory: Path, step: int, file: str) -> Path:
    if file not in SERVED_FILES:
        raise RecordProblem(404, "file", file, f"not served; ask for {' or '.join(SERVED_FILES)}")
    whole = dict(checkpoints(directory))
    if step not in whole:
        kept = _ranges(sorted(whole)) or "none"
        raise RecordProblem(404, "step", step, f"no checkpoint of this step is kept; kept are: {kept}")
    try:
        return inside(root, whole[step] / file)
    except ValueError as error:  # a link that leads out of the storage
        raise RecordProblem(404, "file", file, str(error)) from error
