"""Keys, certificates and the revocation list of a cluster's own authority, as PEM bytes: no file is touched.

The only importer of `cryptography`. What is made here is checked by OpenSSL in every handshake, ours and
Ray's, so a node needs nothing but the standard library to tell a friend from a stranger.

Revocation is an X.509 list and not a format of our own: OpenSSL checks it inside the handshake, on both
sides, before a byte of ours is read, and it is signed by the same authority.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from omlx.errors import BadSetting

AUTHORITY_FOR = timedelta(days=3652)
CLOCKS_DIFFER = timedelta(days=1)
"""Everything is valid from so long before it was made: a node whose clock is behind may use it at once."""
NODE_URI = "omlx:node:"
ALWAYS_NAMED = "127.0.0.1"
"""Every node's certificate has this address, too."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM; the key is never printed."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a certificate says."""

    node_id: str | None
    """None: the authority's own."""
    serial: int
    until: datetime


def make_authority(cluster_id: str) -> Pair:
    """A new authority (EC P-256) that signs nodes and lists, and nothing below them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"oMLX cluster {cluster_id}")
    now = datetime.now(UTC)
    builder = (
        _builder(key.public_key(), name, now, now + AUTHORITY_FOR)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    return Pair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def make_node(
    authority: Pair, node_id: str, names: Iterable[str], addresses: Iterable[str], valid_for: timedelta
) -> Pair:
    """A key and certificate for one node: it may connect and be connected to.

    `names`, `addresses` (checked by the caller) and ALWAYS_NAMED go into the alternative names, for Ray's
    gRPC, which looks there; our own links look at the node id, which stands there as a URI.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    shown: list[x509.GeneralName] = [x509.UniformResourceIdentifier(NODE_URI + node_id)]
    shown += [x509.IPAddress(ipaddress.ip_address(a)) for a in dict.fromkeys([*addresses, ALWAYS_NAMED])]
    shown += [x509.DNSName(name) for name in dict.fromkeys(names)]
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        _builder(key.public_key(), _name(node_id), now, min(now + valid_for, signer.not_valid_after_utc))
        .issuer_name(signer.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName(shown), critical=False)
        .add_extension(_identifier(signer), critical=False)
    )
    return Pair(_pem(builder.sign(_private(authority), hashes.SHA256())), _key_pem(key))


def make_revocations(authority: Pair, serials: Iterable[int], number: int) -> bytes:
    """The signed list of what counts no more; `number` grows with each list.

    It does not run out before the authority does: a coordinator that is away must not cut the nodes off
    from each other. A newer list reaches a node by being sent there.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate)
    since = datetime.now(UTC) - CLOCKS_DIFFER
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.subject)
        .last_update(since)
        .next_update(signer.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_identifier(signer), critical=False)
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since)
        builder = builder.add_revoked_certificate(entry.build())
    listed = builder.sign(_private(authority), hashes.SHA256())
    return listed.public_bytes(serialization.Encoding.PEM)


def make_ssh_key(comment: str) -> tuple[bytes, bytes]:
    """(private, public) of a new ed25519 key in OpenSSH's format; the public one is a line."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b" " + comment.encode("ascii") + b"\n"


def facts(certificate: bytes) -> Facts:
    """Raises BadSetting for what is no certificate."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise BadSetting(f"what should be a certificate is none: {error}") from None
    return Facts(_node_id(found), found.serial_number, found.not_valid_after_utc)


def check_pair(pair: Pair, authority: bytes) -> Facts:
    """That the authority signed the certificate and that the key is the certificate's. Raises BadSetting."""
    try:
        found = x509.load_pem_x509_certificate(pair.certificate)
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        key = serialization.load_pem_private_key(pair.key, None)
    except (ValueError, TypeError, InvalidSignature) as error:
        why = str(error) or "another authority signed it"
        raise BadSetting(f"a certificate that is not of this cluster: {why}") from None
    if key.public_key() != found.public_key():
        raise BadSetting("the key is not the one of the certificate")
    return Facts(_node_id(found), found.serial_number, found.not_valid_after_utc)


def revocations_number(revocations: bytes, authority: bytes) -> int:
    """The list's number, once its signature is found good. Raises BadSetting."""
    try:
        found = x509.load_pem_x509_crl(revocations)
        key = x509.load_pem_x509_certificate(authority).public_key()
        signed = isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key)
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise BadSetting(f"what should be a revocation list is none: {error}") from None
    if not signed:
        raise BadSetting("a revocation list that another authority signed")
    return number


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, made: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(made - CLOCKS_DIFFER)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*wanted: str) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: name in wanted for name in names})


def _identifier(signer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    identifier = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _node_id(certificate: x509.Certificate) -> str | None:
    try:
        shown = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = shown.get_values_for_type(x509.UniformResourceIdentifier)
    found = [uri.removeprefix(NODE_URI) for uri in uris if uri.startswith(NODE_URI)]
    return found[0] if len(found) == 1 else None


def _private(pair: Pair) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pair.key, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadSetting("the authority's key is not one of ours")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
