"""A real Kubernetes control plane as child processes on 127.0.0.1: etcd, kube-apiserver, kube-controller-manager.

Called by `stack` and by the cluster tests. Owns their flags, kubeconfigs and readiness. Each runs under a supervisor:
one that dies comes back with the same data, ports and certificates, and the others wait for it. Schedules no pods: the
one-machine edition runs its parts as processes.
"""

import base64
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from lorafleet_local.binaries import Binaries
from lorafleet_local.certs import (
    ADMIN,
    API_SERVER,
    CONTROLLER_MANAGER,
    ETCD,
    ETCD_CLIENT,
    Identity,
    Pki,
    write_private,
)  # fmt: skip
from lorafleet_local.processes import Process, start, wait_until
from lorafleet_local.state import State
from lorafleet_local.supervise import supervised

OPERATOR_NAMESPACE = "lorafleet-system"
OPERATOR_ACCOUNT = "lorafleet-operator"
OPERATOR = Identity(
    "operator",
    f"system:serviceaccount:{OPERATOR_NAMESPACE}:{OPERATOR_ACCOUNT}",
    ("system:serviceaccounts", f"system:serviceaccounts:{OPERATOR_NAMESPACE}", "system:authenticated"),
)
"""The operator's own identity: its service account, hence the rules of manifests/base and nothing more."""
_READY_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane."""

    url: str
    admin_kubeconfig: Path
    operator_kubeconfig: Path


def start_control_plane(state: State, binaries: Binaries) -> ControlPlane:
    """Start the three processes and wait until the API server is ready.

    The controller manager is started then and not waited for: nothing here needs it in its first second.

    Args:
        state: gets the supervisors; its folder gets PKI, data, logs and kubeconfigs.
        binaries: what to run.

    Raises:
        StartError: a process ended or was not ready in time; the message ends with its log.
    """
    pki = Pki(state.folder / "pki", (ADMIN, API_SERVER, CONTROLLER_MANAGER, ETCD, ETCD_CLIENT, OPERATOR))
    etcd_url = f"https://127.0.0.1:{state.port('etcd')}"
    etcd = _start(state, "etcd", _etcd_argv(state, binaries, pki, etcd_url))
    wait_until("etcd", lambda: _answers(f"{etcd_url}/health", pki, ETCD_CLIENT), _READY_SECONDS, etcd)

    url = f"https://127.0.0.1:{state.port('apiserver')}"
    apiserver = _start(state, "kube-apiserver", _apiserver_argv(state, binaries, pki, etcd_url))
    kubeconfigs = {who.name: _write_kubeconfig(state, pki, url, who) for who in (ADMIN, CONTROLLER_MANAGER, OPERATOR)}
    wait_until("kube-apiserver", lambda: _answers(f"{url}/readyz", pki, ADMIN), _READY_SECONDS, apiserver)
    _start(state, "kube-controller-manager", _controller_manager_argv(state, binaries, pki, kubeconfigs))
    return ControlPlane(url, kubeconfigs[ADMIN.name], kubeconfigs[OPERATOR.name])


def _start(state: State, name: str, argv: list[str]) -> Process:
    command = supervised(name, argv, any_status=True)
    return state.add(start(name, command, state.log(name), state.stack_id))


def _etcd_argv(state: State, binaries: Binaries, pki: Pki, url: str) -> list[str]:
    peer = f"https://127.0.0.1:{state.port('etcd-peer')}"
    return [
        str(binaries.etcd),
        "--name=local",
        f"--data-dir={state.folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=local={peer}",
        f"--cert-file={pki.cert('etcd')}",
        f"--key-file={pki.key('etcd')}",
        f"--trusted-ca-file={pki.cert('ca')}",
        "--client-cert-auth=true",
        f"--peer-cert-file={pki.cert('etcd')}",
        f"--peer-key-file={pki.key('etcd')}",
        f"--peer-trusted-ca-file={pki.cert('ca')}",
        "--peer-client-cert-auth=true",
        "--unsafe-no-fsync",  # a scratch cluster; its objects need not survive a power cut
        "--log-level=warn",
    ]


def _apiserver_argv(state: State, binaries: Binaries, pki: Pki, etcd_url: str) -> list[str]:
    return [
        str(binaries.apiserver),
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={state.ports['apiserver']}",
        "--endpoint-reconciler-type=none",
        f"--etcd-servers={etcd_url}",
        f"--etcd-cafile={pki.cert('ca')}",
        f"--etcd-certfile={pki.cert('etcd-client')}",
        f"--etcd-keyfile={pki.key('etcd-client')}",
        f"--tls-cert-file={pki.cert('apiserver')}",
        f"--tls-private-key-file={pki.key('apiserver')}",
        f"--client-ca-file={pki.cert('ca')}",
        "--authorization-mode=RBAC",
        "--anonymous-auth=false",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki.sa_public}",
        f"--service-account-signing-key-file={pki.key('sa')}",
        "--profiling=false",
        f"--cert-dir={state.folder / 'pki'}",
    ]


def _controller_manager_argv(state: State, binaries: Binaries, pki: Pki, kubeconfigs: dict[str, Path]) -> list[str]:
    kubeconfig = kubeconfigs[CONTROLLER_MANAGER.name]
    return [
        str(binaries.controller_manager),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={state.port('controller-manager')}",
        f"--cert-dir={state.folder / 'pki'}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki.key('sa')}",
        f"--root-ca-file={pki.cert('ca')}",
        f"--cluster-signing-cert-file={pki.cert('ca')}",
        f"--cluster-signing-key-file={pki.key('ca')}",
        "--profiling=false",
    ]


def _write_kubeconfig(state: State, pki: Pki, url: str, who: Identity) -> Path:
    def embed(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    user = {
        "client-certificate-data": embed(pki.cert(who.name)),
        "client-key-data": embed(pki.key(who.name)),
    }
    cluster = {"server": url, "certificate-authority-data": embed(pki.cert("ca"))}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lorafleet-local",
        "clusters": [{"name": "lorafleet-local", "cluster": cluster}],
        "users": [{"name": who.name, "user": user}],
        "contexts": [{"name": "lorafleet-local", "context": {"cluster": "lorafleet-local", "user": who.name}}],
    }
    name = "kubeconfig" if who is ADMIN else f"{who.name}.kubeconfig"
    path = state.folder / name
    write_private(path, json.dumps(config, indent=2).encode() + b"\n")
    return path


def client_context(pki: Pki, who: Identity) -> ssl.SSLContext:
    """TLS settings that trust the private CA and speak for `who`."""
    context = ssl.create_default_context(cafile=str(pki.cert("ca")))
    context.load_cert_chain(str(pki.cert(who.name)), str(pki.key(who.name)))
    return context


def _answers(url: str, pki: Pki, who: Identity) -> bool:
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=client_context(pki, who))
    )
    try:
        with opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
