"""What storage keeps of a run made through /adapter_runs, and how a run comes back from it. Pure.

Such a run has no object that remembers it: its record is its only durable intent. `loop/api_runs.py` reads and writes
the files.
"""

from typing import Literal

from pydantic import Field, JsonValue

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.meta import ApiModel
from lorafleet_api.v1alpha1.wire import ArtifactView, Outcome
from lorafleet_runtime.registry.admission import parse_spec
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import Ending, Run
from lorafleet_runtime.types import Artifact

NAMESPACE = "api"
"""Namespace of these runs: their checkpoints lie in {storage}/api/{name}/{uid}."""

DELETED_TEXT = "deleted through /adapter_runs"


class End(ApiModel):
    """How the run ended."""

    outcome: Outcome
    reason: str
    message: str
    step: int
    start_step: int
    artifact: ArtifactView | None = None
    completion_time: float | None = None


class Record(ApiModel):
    """One file in the pool's folder of API-owned runs."""

    format: Literal[1] = 1
    uid: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$")
    name: str
    spec: dict[str, JsonValue]
    """As the user wrote it, in wire form: the pool's defaults are applied anew at every start, as for objects."""
    save: str | None = None
    """Directory that receives a copy of each export."""
    created: float
    start_time: float | None = None
    target_step: int | None = None
    retired: bool = False
    """DELETE was answered: whatever happens, the run trains no more."""
    exported_step: int | None = None
    """The newest step that `save` has."""
    end: End | None = None


def observe(record: Record, run: Run) -> Record:
    """The record with what has become of the run."""
    end = record.end
    outcome = run.visible_outcome
    if outcome is not None:
        end = End(
            outcome=outcome,
            reason=run.ending.reason if run.ending else run.reason,
            message=run.ending.message if run.ending else run.message,
            step=run.step,
            start_step=run.start_step,
            artifact=None if run.artifact is None else ArtifactView(
                path=run.artifact.path, step=run.artifact.step, digest=run.artifact.digest
            ),
            completion_time=run.completion_time,
        )  # fmt: skip
    changes = {"start_time": run.start_time, "target_step": run.target_step, "end": end}
    return record.model_copy(update=changes)


def restore(registry: Registry, record: Record, artifact: Artifact | None) -> Run:
    """Make the run known again: to go on from its last checkpoint, or as the record of how it ended.

    Args:
        registry: of the new runtime; has not heard of the run.
        record: what was kept.
        artifact: the run's newest whole checkpoint.

    Raises:
        SpecProblem: the spec is none that this version and this pool know.
    """
    end = record.end
    if end is None and record.retired:
        # The stop came between DELETE and the last checkpoint: what was trained since the one before is lost.
        step = 0 if artifact is None else artifact.step
        end = End(outcome="Cancelled", reason=reasons.CANCELLED, message=DELETED_TEXT, step=step, start_step=step)
    if end is None:
        run = registry.put(
            record.uid,
            dict(record.spec),
            namespace=NAMESPACE,
            name=record.name,
            generation=1,
            created=record.created,
            owner="api",
            start_time=record.start_time,
        )
        run.target_step = record.target_step
        return run
    spec = parse_spec(dict(record.spec), registry.pool)
    run = Run(record.uid, NAMESPACE, record.name, "api", spec, 1, 0, record.created)
    run.state = "FAILED" if end.outcome == "Failed" else "COMPLETED"
    run.reason, run.message = end.reason, end.message
    run.ending = Ending(end.outcome, end.reason, end.message, save=False)
    run.step, run.start_step, run.target_step = end.step, end.start_step, record.target_step
    run.start_time, run.completion_time = record.start_time, end.completion_time
    kept = end.artifact
    run.artifact = artifact if kept is None else Artifact(kept.path, kept.step, kept.digest)
    registry.runs[run.uid] = run
    return run
