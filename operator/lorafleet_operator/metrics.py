"""Prometheus metrics of the operator. Series of runs are made at scrape time from the store, so they leave with them.

Label `status` of lorafleet_run_condition is the condition's present status; the value is 1.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lorafleet_operator.reconcile import conditions
from lorafleet_operator.store import Object, Store, pool_key_of

REGISTRY = CollectorRegistry()

RECONCILES = Counter(
    "lorafleet_operator_reconcile", "Reconciliations by result (ok, error).", ["kind", "result"], registry=REGISTRY
)
RECONCILE_SECONDS = Histogram(
    "lorafleet_operator_reconcile_seconds", "Duration of one reconciliation.", ["kind"], registry=REGISTRY
)
STATUS_WRITES = Counter("lorafleet_operator_status_writes", "Status writes accepted.", ["kind"], registry=REGISTRY)
STATUS_CONFLICTS = Counter(
    "lorafleet_operator_status_conflicts", "Status writes tried again after a conflict.", ["kind"], registry=REGISTRY
)
STATUS_WRITE_ERRORS = Counter(
    "lorafleet_operator_status_write_errors", "Status writes refused as invalid.", ["kind"], registry=REGISTRY
)
FORCED_RELEASES = Counter(
    "lorafleet_operator_forced_releases", "Runs released by the force-release annotation.", registry=REGISTRY
)
LOOP_LAG = Gauge("lorafleet_operator_event_loop_lag_seconds", "Lateness of the event loop.", registry=REGISTRY)
LEADING = Gauge(
    "lorafleet_operator_leading", "1 while this operator holds the Lease, 0 while it stands by.", registry=REGISTRY
)
API_LAST_SUCCESS = Gauge(
    "lorafleet_operator_api_last_success_timestamp_seconds",
    "Unix time of the API server's last good answer.",
    registry=REGISTRY,
)
QUEUE_LENGTH = Gauge("lorafleet_operator_queue_length", "Objects waiting to be reconciled.", registry=REGISTRY)
QUEUE_OLDEST = Gauge(
    "lorafleet_operator_queue_oldest_seconds", "Waiting time of the oldest object in the queue.", registry=REGISTRY
)

RUN_LABELS = ("namespace", "name", "pool")


class RunCollector(Collector):
    """Series of runs and pools, from the store.

    Args:
        store: the objects.
        links: pool namespace, pool name and whether its runtime is connected.
    """

    def __init__(self, store: Store, links: Callable[[], list[tuple[str, str, bool]]]) -> None:
        self._store = store
        self._links = links

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One scrape."""
        condition = GaugeMetricFamily(
            "lorafleet_run_condition",
            "Conditions of a run; 1 for the present status.",
            labels=(*RUN_LABELS, "type", "status"),
        )
        info = GaugeMetricFamily("lorafleet_run_info", "What a run is.", labels=(*RUN_LABELS, "uid", "rank", "reason"))
        for run in self._store.objects("adapterruns"):
            labels = _labels(run)
            status = run.get("status") or {}
            for entry in status.get("conditions") or []:
                condition.add_metric([*labels, entry["type"], entry["status"]], 1.0)
            ready = conditions.find(status, "Ready") or {}
            rank = str(run["spec"].get("rank", ""))
            info.add_metric([*labels, run["metadata"]["uid"], rank, ready.get("reason", "")], 1.0)
        connected = GaugeMetricFamily(
            "lorafleet_operator_runtime_connected", "Whether a pool's runtime answers.", labels=("namespace", "pool")
        )
        for namespace, name, ready_now in self._links():
            connected.add_metric([namespace, name], 1.0 if ready_now else 0.0)
        yield from (condition, info, connected)


def _labels(run: Object) -> list[str]:
    meta, pool = run["metadata"], pool_key_of(run)
    label = pool.name if pool.namespace == meta["namespace"] else f"{pool.namespace}/{pool.name}"
    return [meta["namespace"], meta["name"], label]
