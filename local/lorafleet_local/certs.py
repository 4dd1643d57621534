"""The control plane's keys and certificates: one private CA per state folder, reused until it nears its end.

Called by `controlplane`. Keys are readable by their owner only. Signs nothing that leaves the machine.
"""

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=365)
_RENEW_BEFORE = datetime.timedelta(days=7)
SERVICE_IP = "10.96.0.1"

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a certificate speaks for."""

    name: str
    """File name without ending."""
    common_name: str
    """The Kubernetes user."""
    organizations: tuple[str, ...] = ()
    """The Kubernetes groups."""
    server: bool = False
    """Also valid as a server on 127.0.0.1."""


ADMIN = Identity("admin", "lorafleet-local-admin", ("system:masters",))
CONTROLLER_MANAGER = Identity("controller-manager", "system:kube-controller-manager")
API_SERVER = Identity("apiserver", "kube-apiserver", server=True)
ETCD = Identity("etcd", "etcd", server=True)
ETCD_CLIENT = Identity("etcd-client", "etcd-client")


class Pki:
    """The files of one CA in one folder.

    Args:
        folder: made with mode 0700 when it is missing.
        identities: certificates to have ready; missing ones are signed by the existing CA.
    """

    def __init__(self, folder: Path, identities: tuple[Identity, ...]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._is_usable(identities):
            self._create(identities)

    def cert(self, name: str) -> Path:
        """The certificate file of an identity, or of the `ca`."""
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        """The private key file of an identity, of the `ca`, or of the service account signer (`sa`)."""
        return self.folder / f"{name}.key"

    @property
    def sa_public(self) -> Path:
        """Public half of the service account signing key."""
        return self.folder / "sa.pub"

    def _is_usable(self, identities: tuple[Identity, ...]) -> bool:
        names = ["ca", *(identity.name for identity in identities)]
        files = [self.sa_public, self.key("sa"), *(self.key(n) for n in names), *(self.cert(n) for n in names)]
        if not all(file.is_file() for file in files):
            return False
        limit = datetime.datetime.now(datetime.UTC) + _RENEW_BEFORE
        certs = [x509.load_pem_x509_certificate(self.cert(n).read_bytes()) for n in names]
        return all(cert.not_valid_after_utc > limit for cert in certs)

    def _create(self, identities: tuple[Identity, ...]) -> None:
        if not self.key("sa").is_file():  # kept where it exists: tokens in etcd were signed with it
            signer = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            _write_key(self.key("sa"), signer)
        else:
            loaded = serialization.load_pem_private_key(self.key("sa").read_bytes(), password=None)
            assert isinstance(loaded, rsa.RSAPrivateKey)
            signer = loaded
        self.sa_public.write_bytes(
            signer.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _ca_certificate(ca_key)
        _write_key(self.key("ca"), ca_key)
        self.cert("ca").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        for identity in identities:
            key = ec.generate_private_key(ec.SECP256R1())
            cert = _leaf_certificate(identity, key, ca_key, ca)
            _write_key(self.key(identity.name), key)
            self.cert(identity.name).write_bytes(cert.public_bytes(serialization.Encoding.PEM))


def _ca_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lorafleet-local-ca")])
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf_certificate(
    identity: Identity, key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> x509.Certificate:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in identity.organizations]
    subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, identity.common_name)])
    # etcd also dials itself with its server certificate, so servers may act as clients.
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if identity.server else [])]
    builder = (
        _builder(subject, ca.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    if identity.server:
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address(SERVICE_IP)]
        alternatives = [*map(x509.DNSName, names), *map(x509.IPAddress, addresses)]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALID)
    )


def _write_key(path: Path, key: Key) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    write_private(path, pem)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    os.replace(temporary, path)
