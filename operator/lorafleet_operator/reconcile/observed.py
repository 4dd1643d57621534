"""What a decision is based on. Made by the controller, read by the pure functions of this package."""

from dataclasses import dataclass
from typing import Any

from lorafleet_api.v1alpha1 import names
from lorafleet_api.v1alpha1.wire import AdapterList, AdapterView

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PoolLink:
    """What the connection to a pool's runtime knows at this moment."""

    ready: bool
    """The runtime answers, knows this operator's epoch and runs, and gave a listing in this boot epoch."""
    reason: str
    """A reason of the pool's RuntimeReady condition."""
    message: str
    since: float
    """Unix time at which `ready` last flipped."""
    boot_epoch: int | None = None
    operator_epoch: int | None = None
    listing: AdapterList | None = None
    """Newest listing; kept while the runtime does not answer."""
    versions: tuple[tuple[str, str], ...] = ()
    mismatch: tuple[str, ...] = ()
    """Fields in which the pool's spec and the runtime's differ."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The runtime refused this generation of a run's spec."""

    generation: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a run's plan depends on."""

    run: Object
    pool: Object | None
    link: PoolLink | None
    """None while there is no connection to the pool's runtime."""
    refusal: Refusal | None = None
    delete_confirmed: bool = False
    """A DELETE of this uid was answered "gone", and the link's listing was asked for after that answer."""
    now: float = 0.0
    """Unix seconds."""

    @property
    def uid(self) -> str:
        """The run's uid."""
        return str(self.run["metadata"]["uid"])

    @property
    def generation(self) -> int:
        """The run's metadata.generation."""
        return int(self.run["metadata"].get("generation", 0))

    @property
    def status(self) -> Object:
        """The run's status as stored."""
        return self.run.get("status") or {}

    @property
    def deleting(self) -> bool:
        """The object is being deleted."""
        return "deletionTimestamp" in self.run["metadata"]

    @property
    def has_finalizer(self) -> bool:
        """Our finalizer is on the object, so a runtime may know the run."""
        return names.FINALIZER in (self.run["metadata"].get("finalizers") or [])

    @property
    def view(self) -> AdapterView | None:
        """The runtime's view of this run in the newest listing."""
        if self.link is None or self.link.listing is None:
            return None
        return find_view(self.link.listing, self.uid)

    @property
    def holders(self) -> tuple[str, ...]:
        """Who holds the run by their own listings."""
        if self.link is None or self.link.listing is None:
            return ()
        return holders_of(self.link.listing, self.uid)


def find_view(listing: AdapterList, uid: str) -> AdapterView | None:
    """The view of `uid`, or None."""
    return next((view for view in listing.adapters if view.uid == uid), None)


def holders_of(listing: AdapterList, uid: str) -> tuple[str, ...]:
    """Names of those that list `uid`: "trainer slot N" and the engines with an adapter named uid@..."""
    slots = [f"trainer slot {slot}" for slot, holder in sorted(listing.trainer.slots.items()) if holder == uid]
    prefix = f"{uid}@"
    engines = [
        f"engine {engine.engine}"
        for engine in listing.engines
        if any(name == uid or name.startswith(prefix) for name in engine.adapters)
    ]
    return (*slots, *engines)
