"""Command line: `lorafleet-operator --kubeconfig F --namespace N|--all-namespaces`. Parses, then runs `app`."""

import argparse
import asyncio
import logging
import os
import sys

from lorafleet_operator.settings import Settings


def parse(argv: list[str] | None = None) -> tuple[Settings, str]:
    """Settings and log level from flags; every flag's default may come from LORAFLEET_<NAME>."""
    parser = argparse.ArgumentParser(prog="lorafleet-operator", description="Reconciles AdapterPools and AdapterRuns.")
    parser.add_argument("--kubeconfig", default=_env("KUBECONFIG"), help="kubeconfig file; unset: the pod's account")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--namespace", default=_env("NAMESPACE"), help="watch this namespace only")
    scope.add_argument("--all-namespaces", action="store_true", help="watch all namespaces (default)")
    parser.add_argument(
        "--lease-namespace",
        default=_env("LEASE_NAMESPACE"),
        help="namespace of the Lease by which one operator works at a time (default: --namespace, or lorafleet-system)",
    )
    parser.add_argument(
        "--identity",
        default=_env("IDENTITY"),
        help="holder of the Lease; a restart under the same one goes on at once (default: new at each start)",
    )
    parser.add_argument("--metrics-port", type=int, default=int(_env("METRICS_PORT") or 8080), help="0: none")
    parser.add_argument("--health-port", type=int, default=int(_env("HEALTH_PORT") or 8081), help="0: none")
    parser.add_argument("--host", default=_env("HOST") or "0.0.0.0", help="address that both ports bind")
    parser.add_argument(
        "--progress-seconds",
        type=float,
        default=float(_env("PROGRESS_SECONDS") or 15.0),
        help="progress of a run is written at most this often",
    )
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    parser.add_argument("--log-level", default=_env("LOG_LEVEL") or "INFO", choices=levels)
    options = parser.parse_args(argv)
    settings = Settings(
        kubeconfig=options.kubeconfig,
        namespace=None if options.all_namespaces else options.namespace,
        metrics_port=options.metrics_port,
        health_port=options.health_port,
        host=options.host,
        progress_seconds=options.progress_seconds,
        lease_namespace=options.lease_namespace,
        **({"identity": options.identity} if options.identity else {}),
    )
    return settings, options.log_level


def _env(name: str) -> str | None:
    return os.environ.get(f"LORAFLEET_{name}") or None


def main(argv: list[str] | None = None) -> int:
    """Runs the operator; the exit code is 0 after a signal, 1 when a part of it ended, 2 on bad flags, 3 when
    fenced, once the other operator is silent."""
    settings, level = parse(argv)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpcore", "kopf", "asyncio"):
        logging.getLogger(noisy).setLevel("WARNING")
    from lorafleet_operator.app import run
    from lorafleet_operator.errors import ConfigError

    try:
        return asyncio.run(run(settings))
    except ConfigError as error:
        print(f"lorafleet-operator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
