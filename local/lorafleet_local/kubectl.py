"""Finds kubectl: the user's own where it fits the control plane's version, else the PyPI wheel's.

Called by `stack` and `demo`, which act on the cluster as a user would.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MIN_MINOR = 36
"""Oldest 1.x that Kubernetes supports against a 1.37 API server (one minor version of skew)."""


class KubectlError(Exception):
    """kubectl failed; the message holds its own words."""


@functools.cache
def find_kubectl() -> str:
    """The kubectl to use.

    Raises:
        KubectlError: none is installed that works.
    """
    bundled = Path(sys.executable).parent / "kubectl"
    own = shutil.which("kubectl")
    for candidate in (own, str(bundled)):
        if candidate is not None and (_client_minor(candidate) or 0) >= MIN_MINOR:
            return candidate
    raise KubectlError(
        f"no kubectl of at least 1.{MIN_MINOR}: {own or 'none'} on PATH, none at {bundled}; run `make setup`"
    )


def _client_minor(command: str) -> int | None:
    try:
        done = subprocess.run(
            [command, "version", "--client", "-o", "json"], capture_output=True, text=True, timeout=20, check=True
        )
        version = json.loads(done.stdout)["clientVersion"]["gitVersion"]
        return int(version.split(".")[1])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


class Kubectl:
    """kubectl against one cluster.

    Args:
        kubeconfig: whose cluster and identity.
        environment: added to this program's.
    """

    def __init__(self, kubeconfig: Path, environment: Mapping[str, str] | None = None) -> None:
        self.kubeconfig = kubeconfig
        self._environment = environment or {}
        self._command = find_kubectl()

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 60.0) -> str:
        """Run one command and return its standard output.

        Raises:
            KubectlError: a non-zero exit, with kubectl's message, or no end within `timeout` seconds.
        """
        process = self.popen(*arguments, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL)
        try:
            output, errors = process.communicate(stdin, timeout=timeout)
        except BaseException as error:
            process.kill()
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise KubectlError(f"kubectl {' '.join(arguments)}: no end within {timeout:g} s") from error
            raise
        if process.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: exit {process.returncode}: {errors.strip()}")
        return output

    def popen(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Start one command; the caller waits for it."""
        return subprocess.Popen(
            [self._command, *arguments],
            env=self.environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self) -> Mapping[str, str]:
        """The environment that points kubectl here, past any proxy."""
        return {**os.environ, **self._environment, "KUBECONFIG": str(self.kubeconfig), "NO_PROXY": "127.0.0.1"}
