"""TLS 1.3 between peer ids, with libp2p's self-signed certificates: an extension binds each to the peer's own key.

Owns the certificate (libp2p specs, tls/tls.md: "libp2p Public Key Extension"), the contexts that ask both sides for
one, and the authentication of the other end. For Ed25519 the extension has one fixed layout, so there is no parser to
attack. Implemented here because py-libp2p brings 1 s and 50 MB of imports along; tests compare the two both ways.
Knows no frames.
"""

from __future__ import annotations

import ctypes
import datetime
import ssl
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

import base58
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from swarm.errors import NetworkError, ProtocolError
from swarm.net.security.identity import Identity, verify
from swarm.types import PeerId

EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
ALPN = "swarm/2"
MAX_CERTIFICATE = 4096  # bytes; ours take 400
_SIGNED = b"libp2p-tls-handshake:"  # prefix of what the peer signs; the certificate's public key follows
# DER: SEQUENCE { OCTET STRING public key protobuf, OCTET STRING signature }, of 36 and 64 bytes for Ed25519.
_HEAD = bytes([0x30, 0x68, 0x04, 0x24])
_KEY = slice(4, 40)
_MIDDLE = bytes([0x04, 0x40])
_SIZE = 106
_BACKDATED = datetime.timedelta(hours=1)  # for clocks that differ
_LIFETIME = datetime.timedelta(days=365)
_MALFORMED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""All that cryptography raises on hostile certificates."""


def contexts(identity: Identity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """-> (for accepting, for dialling) with one fresh certificate. Raises NetworkError where Python's ssl cannot."""
    certificate, key = make_certificate(identity)
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:  # ssl reads keys from files only; 0700
        path = Path(folder) / "certificate"
        path.write_bytes(certificate + key)
        server = _context(ssl.PROTOCOL_TLS_SERVER, path)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, path)
    _ask_for_certificates(server)
    return server, client


def make_certificate(identity: Identity) -> tuple[bytes, bytes]:
    """-> (certificate, its throw-away private key), both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    proof = _HEAD + _protobuf(identity.peer) + _MIDDLE + identity.sign(_SIGNED + public)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libp2p")])
    begin = datetime.datetime.now(datetime.UTC) - _BACKDATED
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + _LIFETIME)
        .add_extension(x509.UnrecognizedExtension(EXTENSION, proof), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def peer_id_of_connection(tls: ssl.SSLObject) -> PeerId:
    """The other end's peer id after a finished TLS handshake. Raises ProtocolError if it is not authenticated."""
    if tls.selected_alpn_protocol() != ALPN or tls.version() != "TLSv1.3":
        raise ProtocolError("not a connection of this protocol")
    der = tls.getpeercert(binary_form=True)
    if der is None:
        raise ProtocolError("the other side showed no certificate")
    return peer_id_of_certificate(der)


def peer_id_of_certificate(der: bytes) -> PeerId:
    """The peer id that a certificate is for. Raises ProtocolError unless it is well-formed, valid now and signed by
    that peer.

    The TLS handshake proves that the other side holds the certificate's key.
    """
    if len(der) > MAX_CERTIFICATE:
        raise ProtocolError(f"a certificate of {len(der)} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what untrusted peers send
            certificate = x509.load_der_x509_certificate(der)
        extension = certificate.extensions.get_extension_for_oid(EXTENSION).value
        certificate.verify_directly_issued_by(certificate)
        public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except _MALFORMED as error:
        raise ProtocolError(f"not a peer's certificate: {error}") from None
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise ProtocolError("a certificate without a peer's signature")
    now = datetime.datetime.now(datetime.UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise ProtocolError("a certificate that is out of date; is a clock wrong?")
    proof = extension.value
    if len(proof) != _SIZE or proof[:4] != _HEAD or proof[40:42] != _MIDDLE:
        raise ProtocolError("a certificate that is not signed by an Ed25519 peer id")
    peer = base58.b58encode(bytes([0x00, 36]) + proof[_KEY]).decode()
    if not verify(peer, _SIGNED + public, proof[42:]):
        raise ProtocolError(f"{peer} did not sign this certificate")
    return peer


def _protobuf(peer: PeerId) -> bytes:
    """The public key of an Ed25519 peer id as libp2p's protobuf: the id without its multihash prefix."""
    return base58.b58decode(peer)[2:]


def _context(protocol: int, path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # self-signed: we check the identity ourselves
    context.set_alpn_protocols([ALPN])
    context.options |= ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed connection would show no certificate
    context.load_cert_chain(path)
    return context


# OpenSSL can request a client certificate without verifying it. Python cannot: CERT_OPTIONAL also demands a certificate
# authority. So the verification callback is set in OpenSSL itself, as py-libp2p does; but the function is taken from
# the library that Python's ssl is linked with.
_VERIFY_PEER = 0x01
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_accept_any = _Callback(lambda _ok, _store: 1)
_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)  # of a CPython object; PySSLContext begins with its SSL_CTX pointer


def _ask_for_certificates(context: ssl.SSLContext) -> None:
    """Raises NetworkError where that is not possible."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NetworkError("this Python's ssl cannot ask clients for certificates")
    import _ssl

    try:
        set_verify = ctypes.CDLL(_ssl.__file__).SSL_CTX_set_verify
    except (AttributeError, OSError):
        raise NetworkError("this Python's OpenSSL is out of reach, so it cannot ask clients for certificates") from None
    set_verify.argtypes = [ctypes.c_void_p, ctypes.c_int, _Callback]
    set_verify.restype = None
    pointer = ctypes.c_void_p.from_address(id(context) + _HEADER).value
    set_verify(pointer, _VERIFY_PEER, _accept_any)
    if context.verify_mode != ssl.CERT_OPTIONAL:  # Python reads back OpenSSL's setting
        raise NetworkError("this Python's ssl cannot ask clients for certificates")
