"""Runs made through /adapter_runs: durable before they are answered, back after a restart, never the operator's.

    POST ─▶ checks ─▶ record on storage ─▶ registry         DELETE ─▶ record says retired ─▶ registry
    boot ─▶ records ─▶ registry: live runs go on from their checkpoints, ended ones come back as records
    keep: start time, target and end of each run follow into its record; exports are copied to `save`

consumes: HTTP calls, registry changes      produces: registry calls, {storage}/.lorafleet/{pool}/runs/{uid}.json
waits for: the signal, or a retry           unblocked by: any registry change
One lock orders all writes of records. After an await the registry is looked at again.
"""

import asyncio
import errno
import json
import logging
import re
import time
import uuid
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop.api_config import ConfigProblem, explain, to_spec, users_field
from lorafleet_runtime.loop.exports import check_target, export, is_there
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.admission import SpecProblem, check_limits, parse_spec
from lorafleet_runtime.registry.api_owned import DELETED_TEXT, NAMESPACE, Record, observe, restore
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.rewards.resolve import resolve_reward
from lorafleet_runtime.storage import (
    STATE_FILE,
    WEIGHTS_FILE,
    inside,
    latest_checkpoint,
    run_directory,
    step_of,
    sync_directory,
    write_durably,
)
from lorafleet_runtime.types import Artifact

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
KEPT_ENDED = 1024
"""Records of ended runs; beyond, the oldest are forgotten. Their files stay."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_RESERVED = frozenset({"state"})
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Refused(Exception):
    """A call that changed nothing.

    Args:
        status: HTTP status.
        field: what is wrong.
        value: what was received; None where the fix says it.
        fix: what is wrong, and what to do.
    """

    def __init__(self, status: int, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}: {fix}" if value is None else f"{field}: {value!r:.300}: {fix}")
        self.status, self.field, self.value, self.fix = status, field, value, fix


class ApiRuns:
    """All API-owned runs of one pool.

    Args:
        registry: where they live beside the operator's.
        signal: set on every registry change.
        folder: of the records.
        storage_root: checkpoints, data and exports.
    """

    def __init__(self, registry: Registry, signal: Signal, folder: Path, storage_root: Path) -> None:
        self._registry = registry
        self._signal = signal
        self._folder = folder
        self._root = storage_root
        self._records: dict[str, Record] = {}
        """What is durable, by uid."""
        self._failed_exports: dict[str, int] = {}
        self._lock = asyncio.Lock()

    # --- boot ------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Bring back every recorded run. A file that cannot be used is reported and left alone."""
        records = [r for path in sorted(self._folder.glob("[!.]*.json")) if (r := _read(path)) is not None]
        for record in sorted(records, key=lambda r: (r.created, r.uid)):
            try:
                run = restore(self._registry, record, self._newest(record))
            except SpecProblem as error:
                log.error("%s: not restored: %s; correct the file or remove it", self._path(record.uid), error)
                continue
            self._records[record.uid] = record
            log.info("API-owned run %s (%s) is back: %s", record.name, record.uid, run.state)

    def _newest(self, record: Record) -> Artifact | None:
        newest = latest_checkpoint(run_directory(self._root, NAMESPACE, record.name, record.uid))
        if newest is None:
            return None
        digest = json.loads((newest / STATE_FILE).read_text())["files"][WEIGHTS_FILE].get("sha256", "")
        return Artifact(str(newest), step_of(newest), digest)

    # --- calls -----------------------------------------------------------------------------------------------

    def runs(self) -> list[Run]:
        """Every API-owned run, oldest first."""
        return sorted((r for r in self._registry.runs.values() if r.owner == "api"), key=lambda r: (r.created, r.uid))

    def find(self, name: str) -> Run | None:
        """The newest run of that name."""
        return next((r for r in reversed(self.runs()) if r.name == name), None)

    def record(self, run: Run) -> Record:
        """What is kept of a run."""
        return self._records[run.uid]

    async def post(self, name: str, config: dict[str, Any]) -> Run:
        """Register a run.

        Raises:
            Refused: 400 or 422 for name or configuration, 409 without a free slot, 503 before the operator has told
                its runs again, 507 or 503 when storage does not take the record. Nothing is registered then.
        """
        async with self._lock:
            record = await asyncio.to_thread(self._admit, name, config)
            self._check_free(record)
            await self._write(record)
            try:
                self._check_free(record)  # the operator may have spoken meanwhile
            except Refused:
                await self._remove(record.uid)
                raise
            for old in [r for r in self.runs() if r.name == name]:
                self._registry.delete(old.uid)
                await self._remove(old.uid)
            self._records[record.uid] = record
            return self._registry.put(
                record.uid,
                dict(record.spec),
                namespace=NAMESPACE,
                name=name,
                generation=1,
                created=record.created,
                owner="api",
            )

    async def retire(self, name: str) -> Run:
        """Take a run from training for good; its record stays. A run that has ended, or is about to, is left alone.

        Raises:
            Refused: 404 for an unknown name; 507 or 503 when storage does not take the intent.
        """
        async with self._lock:
            run = self.find(name)
            if run is None:
                raise Refused(404, "name", name, "is not known here; GET /adapter_runs lists what is")
            record = self._records[run.uid]
            if run.state not in TERMINAL and run.ending is None:
                retired = observe(record, run).model_copy(update={"retired": True})
                await self._write(retired)
                self._records[run.uid] = retired
                self._registry.retire(run.uid, "Cancelled", reasons.CANCELLED, DELETED_TEXT, save=True)
            return run

    def _admit(self, name: str, config: dict[str, Any]) -> Record:
        """Every check that needs no slot; looks at storage, so it runs in a thread."""
        if not _NAME.fullmatch(name) or name in _RESERVED:
            fix = "use 1 to 253 letters, digits, '.', '_' and '-', a letter or digit first; 'state' is a route"
            raise Refused(400, "name", name, fix)
        try:
            wire, save = to_spec(config)
            try:
                spec = parse_spec(wire, self._registry.pool)
            except SpecProblem as error:
                raise explain(error) from error
            self._check_usable(spec)
            target = None if save is None else str(check_target(self._root, save))
        except ConfigProblem as error:
            raise Refused(422 if error.malformed else 400, error.field, error.value, error.fix) from error
        return Record(uid=str(uuid.uuid4()), name=name, spec=wire, save=target, created=time.time())

    def _check_usable(self, spec: AdapterRunSpec) -> None:
        try:
            check_limits(spec, self._registry.pool)
            resolve_reward(spec, self._registry.pool.reward_modules)
        except RunError as error:
            field, _, fix = error.message.partition(": ")
            raise ConfigProblem(users_field(field), None, fix) from error
        if "://" in spec.data:
            return
        try:
            path = inside(self._root, spec.data)
        except ValueError as error:
            raise ConfigProblem("data", spec.data, str(error)) from error
        if not path.is_file():
            raise ConfigProblem("data", spec.data, "is no file on the pool's storage; upload it or correct the path")

    def _check_free(self, wanted: Record) -> None:
        for run in (r for r in self.runs() if r.state not in TERMINAL):
            if run.name == wanted.name:
                fix = f"is {run.state}; DELETE it and wait for COMPLETED, or use another name"
                raise Refused(400, "name", run.name, fix)
            if wanted.save is not None and self._records[run.uid].save == wanted.save:
                fix = f"the live run {run.name!r} saves there; use another directory"
                raise Refused(400, "save", wanted.save, fix)
        if self._registry.operator_epoch and not self._registry.synced:
            fix = "the operator has not told since the runtime's start which slots its runs hold; try again in a moment"
            raise Refused(503, "slots", None, fix)
        slots = self._registry.slots()
        if slots.used + slots.queued >= slots.total:
            taken = f"{slots.used} of {slots.total} taken, {slots.queued} waited for"
            raise Refused(409, "slots", taken, "only runs made as objects queue; try again when one is free")

    # --- what follows from the registry ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Let records and exports follow the registry, for ever."""
        while True:
            try:
                await self.flush()
                pause = None
            except (OSError, Refused) as error:
                log.error("records of API-owned runs: %s; trying again in %.0f s", error, RETRY_SECONDS)
                pause = RETRY_SECONDS
            await self._signal.wait(pause)

    async def flush(self) -> None:
        """Bring every record and export up to date; returns without an await after the last look.

        Raises:
            Refused, OSError: storage takes no more at the moment.
        """
        while (run := self._behind()) is not None:
            async with self._lock:
                if run.uid not in self._records:
                    continue
                record = observe(self._records[run.uid], run)
                if record != self._records[run.uid]:
                    await self._write(record)
                    self._records[run.uid] = record
            if record.save is not None and self._to_export(record, run) is not None:
                await self._export(record, run)
        for uid in self._surplus():
            self._registry.delete(uid)
            await self._remove(uid)

    def _behind(self) -> Run | None:
        for run in self.runs():
            record = self._records.get(run.uid)
            if record is not None and (observe(record, run) != record or self._to_export(record, run) is not None):
                return run
        return None

    def _to_export(self, record: Record, run: Run) -> Artifact | None:
        new = run.artifact
        if record.save is None or new is None or new.step <= (record.exported_step or -1):
            return None
        return None if self._failed_exports.get(run.uid) == new.step else new

    async def _export(self, record: Record, run: Run) -> None:
        artifact = self._to_export(record, run)
        assert artifact is not None and record.save is not None
        try:
            await asyncio.to_thread(export, self._root, artifact, record.save)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _FULL and is_there(artifact):
                raise
            log.error("run %s: step %d not copied to save %s: %s", run.name, artifact.step, record.save, error)
            self._failed_exports[run.uid] = artifact.step
            return
        async with self._lock:
            if (now := self._records.get(run.uid)) is not None:
                now = now.model_copy(update={"exported_step": artifact.step})
                await self._write(now)
                self._records[run.uid] = now

    def _surplus(self) -> list[str]:
        ended = [r for r in self.runs() if r.state in TERMINAL and r.uid in self._records]
        return [r.uid for r in ended[: max(0, len(ended) - KEPT_ENDED)]]

    # --- files -----------------------------------------------------------------------------------------------

    def _path(self, uid: str) -> Path:
        return self._folder / f"{uid}.json"

    async def _write(self, record: Record) -> None:
        try:
            await asyncio.to_thread(write_durably, self._path(record.uid), record.to_wire())
        except OSError as error:
            full = error.errno in _FULL
            fix = "free space and try again" if full else "repair the volume and try again"
            text = f"storage did not take the record ({error.strerror or error}); nothing was changed; {fix}"
            raise Refused(507 if full else 503, "storage", str(self._folder), text) from error

    async def _remove(self, uid: str) -> None:
        self._records.pop(uid, None)
        self._failed_exports.pop(uid, None)

        def remove() -> None:
            self._path(uid).unlink(missing_ok=True)
            sync_directory(self._folder)

        await asyncio.to_thread(remove)


def _read(path: Path) -> Record | None:
    try:
        record = Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        log.error("%s is no record of a run (%s); skipped; restore it from a backup or remove it", path, why)
        return None
    if f"{record.uid}.json" != path.name or not _NAME.fullmatch(record.name):
        log.error("%s names uid %s and run %r; skipped; give the file its own name", path, record.uid, record.name)
        return None
    return record
