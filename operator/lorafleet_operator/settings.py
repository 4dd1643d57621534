"""Settings of one operator process. Made by `__main__` from flags and environment; read by everyone else."""

import socket
import uuid
from dataclasses import dataclass, field

INSTALL_NAMESPACE = "lorafleet-system"
"""Where manifests/base puts the operator."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be tuned; the defaults suit a cluster."""

    kubeconfig: str | None = None
    """Path of a kubeconfig; None means the service account of the pod."""
    namespace: str | None = None
    """The one namespace to watch; None means all."""
    lease_namespace: str | None = None
    """Namespace of the Lease that keeps a second operator waiting; None means `namespace`, or lorafleet-system."""
    identity: str = field(default_factory=lambda: f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}")
    """Who holds the Lease. A process that is started again under the same identity need not wait for it to expire."""
    lease_seconds: float = 15.0
    """An operator that has not renewed its Lease for so long is replaced."""
    metrics_port: int = 0
    """Port of /metrics; 0 serves none."""
    health_port: int = 0
    """Port of /healthz and /readyz; 0 serves none."""
    host: str = "0.0.0.0"
    """Address that both ports bind."""
    progress_seconds: float = 15.0
    """Progress of a run is written at most this often."""
    queue_position_seconds: float = 60.0
    """A queue position that alone changed is written at most this often per run; so is a message."""
    pool_grace_seconds: float = 30.0
    """A run whose pool does not exist fails this long after its creation."""
    lost_grace_seconds: float = 10.0
    """A runtime that does not answer for this long is lost for its runs' conditions."""
    pool_linger_seconds: float = 15.0
    """A deleted pool's connection is kept this long, to deregister runs deleted together with it."""
    deadline_grace_seconds: float = 5.0
    """The runtime enforces deadlines; the operator does so itself this much later."""
    resync_seconds: float = 300.0
    """Every object is listed and reconciled again this often, should a watch have lost something."""
    poll_seconds: float = 30.0
    """Length of a long poll of the runtime."""
    workers: int = 8
    """Objects reconciled at once."""
    writes_per_second: float = 20.0
    """Status writes of all runs together."""
    places_per_second: float = 2.0
    """Of these, writes of nothing but a queue position."""

    @property
    def lease_home(self) -> str:
        """The namespace of the Lease."""
        return self.lease_namespace or self.namespace or INSTALL_NAMESPACE
