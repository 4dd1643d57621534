"""Kubeconfig and service account: what is read, and what a mistake is told."""

import base64
from pathlib import Path

import pytest
import yaml

from lorafleet_operator.errors import ConfigError
from lorafleet_operator.handlers.watch import connection_info
from lorafleet_operator.kube.access import load_access


def kubeconfig(tmp_path: Path, user: dict[str, object], cluster: dict[str, object] | None = None) -> str:
    """A kubeconfig file with one context."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:6443/"} | (cluster or {})}],
        "users": [{"name": "u", "user": user}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


def test_certificates_are_read_from_data_and_from_files_beside_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("CA", encoding="ascii")
    data = base64.b64encode(b"CERT").decode()
    path = kubeconfig(tmp_path, {"client-certificate-data": data}, {"certificate-authority": "ca.crt"})
    access = load_access(path)
    assert (access.server, access.ca_pem, access.cert_pem) == ("https://127.0.0.1:6443", "CA", "CERT")


def test_token_file_is_read_at_every_use(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n", encoding="utf-8")
    access = load_access(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert access.token == "one"
    token.write_text("two", encoding="utf-8")
    assert access.token == "two"


def test_kopf_gets_the_same_credentials(tmp_path: Path) -> None:
    access = load_access(kubeconfig(tmp_path, {"token": "t"}, {"insecure-skip-tls-verify": True}))
    info = connection_info(access)
    assert (info.server, info.token, info.insecure) == ("https://127.0.0.1:6443", "t", True)


def test_credentials_do_not_show_in_logs(tmp_path: Path) -> None:
    assert "hunter2" not in repr(load_access(kubeconfig(tmp_path, {"token": "hunter2"})))


def test_exec_plugins_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a plugin; use a certificate or a token"):
        load_access(kubeconfig(tmp_path, {"exec": {"command": "x"}}))


def test_missing_file_and_missing_account_say_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kubeconfig /nowhere.*give a readable kubeconfig"):
        load_access("/nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="pass --kubeconfig"):
        load_access(None)
