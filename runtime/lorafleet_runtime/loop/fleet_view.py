"""What the HTTP layer sees of the fleet: the registry, the wake-up and where runs' records lie. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry


@dataclass(slots=True)
class FleetView:
    """The loop's face towards HTTP."""

    registry: Registry
    signal: Signal
    storage_root: Path

    @property
    def ready(self) -> bool:
        """The operator has spoken, the trainer and at least one engine answer."""
        registry = self.registry
        return registry.synced and registry.trainer_ready and any(e.ready for e in registry.engines.values())
