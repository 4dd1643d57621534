"""How to reach the API server: from a kubeconfig or from the pod's service account.

Used by the client and, through `connection_info`, by kopf. Credentials stay in memory; they are never logged.
"""

import base64
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lorafleet_operator.errors import ApiUnavailable, ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Address and credentials of an API server."""

    server: str
    ca_pem: str | None = field(default=None, repr=False)
    cert_pem: str | None = field(default=None, repr=False)
    key_pem: str | None = field(default=None, repr=False)
    static_token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """Read again at every use: projected tokens rotate."""
    insecure: bool = False

    @property
    def token(self) -> str | None:
        """The bearer token of this moment.

        Raises:
            ApiUnavailable: the token file cannot be read now; it is replaced while it rotates.
        """
        if self.token_file is None:
            return self.static_token
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiUnavailable(f"token file {self.token_file}: {error}; make it readable") from error

    def ssl_context(self) -> ssl.SSLContext:
        """A TLS context with the CA and, where there is one, the client certificate."""
        context = ssl.create_default_context(cadata=self.ca_pem)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_pem and self.key_pem:
            with _private_file(self.cert_pem + "\n" + self.key_pem) as path:
                context.load_cert_chain(path)
        return context


def load_access(kubeconfig: str | None) -> ApiAccess:
    """Reads the kubeconfig's current context, or the pod's service account when no file is given.

    Raises:
        ConfigError: a file or field is missing, or the user needs an exec plugin.
    """
    return _from_kubeconfig(Path(kubeconfig)) if kubeconfig else _from_service_account()


def _from_service_account() -> ApiAccess:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = SERVICE_ACCOUNT / "token"
    if not host or not token.is_file():
        raise ConfigError("kubeconfig: not given, and this is no pod with a service account; pass --kubeconfig FILE")
    bracketed = f"[{host}]" if ":" in host else host
    ca_pem = (SERVICE_ACCOUNT / "ca.crt").read_text(encoding="utf-8")
    return ApiAccess(server=f"https://{bracketed}:{port}", ca_pem=ca_pem, token_file=token)


def _from_kubeconfig(path: Path) -> ApiAccess:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"kubeconfig {path}: {error}; give a readable kubeconfig file") from error
    if not isinstance(config, dict):
        raise ConfigError(f"kubeconfig {path}: not a mapping; give a kubeconfig file")
    context = _named(config, "contexts", "context", config.get("current-context"), path)
    cluster = _named(config, "clusters", "cluster", context.get("cluster"), path)
    user = _named(config, "users", "user", context.get("user"), path)
    if "exec" in user or "auth-provider" in user:
        raise ConfigError(f"kubeconfig {path}: user {context['user']!r} needs a plugin; use a certificate or a token")
    token_file = user.get("tokenFile")
    return ApiAccess(
        server=str(cluster["server"]).rstrip("/"),
        ca_pem=_pem(cluster, "certificate-authority", path),
        cert_pem=_pem(user, "client-certificate", path),
        key_pem=_pem(user, "client-key", path),
        static_token=user.get("token"),
        token_file=path.parent / token_file if token_file else None,
        insecure=bool(cluster.get("insecure-skip-tls-verify", False)),
    )


def _named(config: dict[str, Any], kind: str, inner: str, name: Any, path: Path) -> dict[str, Any]:
    for entry in config.get(kind) or []:
        if entry.get("name") == name:
            return dict(entry.get(inner) or {})
    raise ConfigError(f"kubeconfig {path}: {kind} has no {name!r}; add it or change current-context")


def _pem(entry: dict[str, Any], name: str, path: Path) -> str | None:
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"]).decode("ascii")
    if name in entry:
        try:
            return (path.parent / str(entry[name])).read_text(encoding="ascii")
        except OSError as error:
            raise ConfigError(f"kubeconfig {path}: {name} {entry[name]!r}: {error.strerror}; fix the path") from error
    return None


@contextmanager
def _private_file(content: str) -> Iterator[str]:
    """A 0600 file for the ssl module, which reads certificates only from disk."""
    handle, name = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(content)
        yield name
    finally:
        os.unlink(name)
