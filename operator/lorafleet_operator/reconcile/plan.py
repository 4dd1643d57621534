"""What the controller is to do for a run. Pure data; `run.plan_run` makes it, `controller` carries it out in order."""

from dataclasses import dataclass
from typing import Any, Literal

from lorafleet_api.v1alpha1.wire import PutAdapter


@dataclass(frozen=True, slots=True)
class Notice:
    """An Event to record."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    on_pool: bool = False
    """About the pool, because the run's object is going away."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps towards the state that the spec asks for. Unset means: nothing of that kind.

    The order of execution is the order of the fields.
    """

    add_finalizer: bool = False
    status: dict[str, Any] | None = None
    """The whole desired status; written only if it differs."""
    put: PutAdapter | None = None
    """Sent only after the finalizer is on the object."""
    delete: bool = False
    """Ask the runtime to deregister (or to forget) the run."""
    notices: tuple[Notice, ...] = ()
    remove_finalizer: bool = False
    delete_object: bool = False
    """ttlSecondsAfterFinished passed."""
    again_in: float | None = None
    """Seconds until the clock alone may change the plan."""
