"""Prometheus metrics of the runtime. Series of a run are read from the registry at scrape time and leave with it."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.types import BatchResult, PolicyMeans

_LABELS = ["namespace", "name", "pool"]
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


def _policy(read: Callable[[PolicyMeans], float | None]) -> Callable[[Run], float | None]:
    """None until the model saw tokens of a step."""
    return lambda run: None if run.progress.policy is None else read(run.progress.policy)


_RUN_GAUGES: dict[str, tuple[str, Callable[[Run], float | None]]] = {
    "step": ("Optimizer steps done.", lambda r: r.step),
    "target_step": ("Optimizer steps wanted.", lambda r: r.target_step),
    "reward_mean": ("Mean reward of the last step's samples.", lambda r: r.progress.reward_mean),
    "learning_rate": ("Learning rate of the last step.", lambda r: r.progress.lr),
    "grad_norm": ("Gradient norm of the last step, before clipping.", lambda r: r.progress.grad_norm),
    "mismatch": ("Mean |trainer - sampler log-probability| of the last step.", _policy(lambda p: p.mismatch)),
    "entropy": ("Mean entropy of the policy over the last step's response tokens, nats.", _policy(lambda p: p.entropy)),
    "kl_sampler": ("KL(sampler, trainer) of the last step, per token: k3 estimate.", _policy(lambda p: p.kl_sampler)),
    "kl_sampler_k1": (
        "KL(sampler, trainer) of the last step, per token: k1 estimate.",
        _policy(lambda p: p.kl_sampler_k1),
    ),
    "kl_base": (
        "KL(policy, base) of the last step, per token: k3 estimate; of runs with a KL term.",
        _policy(lambda p: p.kl_base),
    ),
    "clip_fraction": (
        "Share of the last step's response tokens whose gradient the clip or the dual clip stopped.",
        _policy(lambda p: p.clip_fraction),
    ),
    "tis_fraction": (
        "Share of the last step's response tokens whose mismatch weight tisMode truncated or masked.",
        _policy(lambda p: p.tis_fraction),
    ),
    "last_step_timestamp_seconds": ("Unix time of the last step.", lambda r: r.progress.last_step_time),
    "buffered_groups": ("Prompt groups waiting for the trainer.", lambda r: r.progress.buffered),
}


class RuntimeMetrics:
    """Histograms and counters of the pool, and a collector over the registry's runs."""

    def __init__(self, registry: Registry, pool: str) -> None:
        self.collectors = CollectorRegistry()
        self._pool = pool
        self.step_duration = Histogram(
            "lorafleet_step_duration_seconds",
            "Time between two optimizer steps of one run.",
            buckets=_BUCKETS,
            registry=self.collectors,
        )
        self.publish_seconds = Histogram(
            "lorafleet_publish_seconds",
            "Time to put one version on every engine.",
            buckets=_BUCKETS,
            registry=self.collectors,
        )
        self.rollout_tokens = Counter(
            "lorafleet_rollout_tokens", "Tokens sampled into groups that the loop took.", registry=self.collectors
        )
        self.train_tokens = Counter(
            "lorafleet_train_tokens", "Rows that went through the trainer, prompts shared.", registry=self.collectors
        )
        self.train_seconds = Counter(
            "lorafleet_train_busy_seconds", "Time the trainer spent on forward and backward.", registry=self.collectors
        )
        self.collectors.register(_RunCollector(registry, pool))

    def observe_batch(self, result: BatchResult) -> None:
        """Count one accumulate call."""
        self.train_tokens.inc(result.rows)
        self.train_seconds.inc(result.seconds)

    def observe_step(self, run: Run, now: float) -> None:
        """Count one optimizer step; call before the registry counts it."""
        if run.progress.since is not None:
            self.step_duration.observe(now - run.progress.since)


class _RunCollector(Collector):
    def __init__(self, registry: Registry, pool: str) -> None:
        self._registry = registry
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        runs = [r for r in self._registry.runs.values() if r.state not in TERMINAL]
        for key, (text, read) in _RUN_GAUGES.items():
            gauge = GaugeMetricFamily(f"lorafleet_run_{key}", text, labels=_LABELS)
            for run in runs:
                value = read(run)
                if value is not None:
                    gauge.add_metric([run.namespace, run.name, self._pool], float(value))
            yield gauge
        dropped = CounterMetricFamily(
            "lorafleet_run_dropped", "Prompt groups that yielded no samples.", labels=[*_LABELS, "reason"]
        )
        for run in runs:
            for reason, count in run.progress.dropped.items():
                dropped.add_metric([run.namespace, run.name, self._pool, reason], float(count))
        yield dropped
        slots = self._registry.slots()
        family = GaugeMetricFamily("lorafleet_pool_slots", "Slots of the pool.", labels=["pool", "state"])
        for state, count in (("total", slots.total), ("used", slots.used), ("queued", slots.queued)):
            family.add_metric([self._pool, state], float(count))
        yield family
