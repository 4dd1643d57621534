"""Keys are private, certificates chain to the CA and are reused."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lorafleet_local import certs
from lorafleet_local.certs import Identity, Pki

SERVER = Identity("server", "srv", server=True)
CLIENT = Identity("client", "system:someone", ("group-a", "group-b"))


def load(pki: Pki, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pki.cert(name).read_bytes())


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki", (SERVER, CLIENT))
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "pki").glob("*.key")}
    assert modes == {0o600}
    assert stat.S_IMODE(pki.folder.stat().st_mode) == 0o700


def test_leaves_are_signed_by_the_ca(tmp_path: Path) -> None:
    pki = Pki(tmp_path, (SERVER, CLIENT))
    for name in ("server", "client"):
        load(pki, name).verify_directly_issued_by(load(pki, "ca"))


def test_user_and_groups_are_in_the_subject(tmp_path: Path) -> None:
    subject = load(Pki(tmp_path, (CLIENT,)), "client").subject
    assert [a.value for a in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["system:someone"]
    assert [a.value for a in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["group-a", "group-b"]


def test_only_servers_have_server_usage_and_addresses(tmp_path: Path) -> None:
    pki = Pki(tmp_path, (SERVER, CLIENT))
    usage = load(pki, "client").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    names = load(pki, "server").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "127.0.0.1" in [str(address) for address in names.get_values_for_type(x509.IPAddress)]


def test_a_second_start_reuses_every_file(tmp_path: Path) -> None:
    first = {file.name: file.read_bytes() for file in Pki(tmp_path, (SERVER,)).folder.iterdir()}
    assert {file.name: file.read_bytes() for file in Pki(tmp_path, (SERVER,)).folder.iterdir()} == first


def test_certificates_near_their_end_are_made_again_but_not_the_token_signer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path, (SERVER,))
    before, signer = pki.cert("ca").read_bytes(), pki.key("sa").read_bytes()
    monkeypatch.setattr(certs, "_RENEW_BEFORE", certs._VALID)  # now every certificate is near its end
    Pki(tmp_path, (SERVER,))
    assert pki.cert("ca").read_bytes() != before
    assert pki.key("sa").read_bytes() == signer
