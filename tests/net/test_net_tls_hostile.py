"""Untrusted peers at the TLS transport: none of their frames is read."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from swarm import codec
from swarm.errors import ConnectionLost, NetworkError, PeerUnreachable, ProtocolError, UsageError
from swarm.messages import Ping
from swarm.net.base.transport import Connection
from swarm.net.security import tls_certificates
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret, public_authenticator
from swarm.net.security.tls_certificates import contexts, make_certificate, peer_id_of_certificate
from swarm.net.transports.tls import TlsTransport

FRAME = codec.encode(Ping(1))[0]


class Listener:
    """A direct transport that notes every connection it let in and every frame it read."""

    def __init__(self, transport: TlsTransport) -> None:
        self.transport = transport
        self.let_in: list[str] = []
        self.frames = 0

    async def handle(self, connection: Connection) -> None:
        self.let_in.append(connection.peer)
        with contextlib.suppress(NetworkError):
            while True:
                await connection.receive()
                self.frames += 1

    @property
    def port(self) -> int:
        return self.transport.bound[0].port


@contextlib.asynccontextmanager
async def listener(secret: SwarmSecret | None = None) -> AsyncIterator[Listener]:
    authenticator = secret.authenticate if secret else public_authenticator
    transport = await TlsTransport.start(Identity.generate(), ["127.0.0.1"], authenticator=authenticator)
    held = Listener(transport)
    await transport.serve(held.handle)
    try:
        yield held
    finally:
        await transport.close()


async def _refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Whoever listens hangs up on us, and says no more than its nonce before."""
    try:
        async with asyncio.timeout(8):
            assert len(await reader.read()) <= 1 + 32
    except (OSError, ssl.SSLError):
        pass
    finally:
        writer.close()


def _context(certificate: bytes | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([tls_certificates.ALPN])
    if certificate is not None:
        path = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"swarm-test-{id(context)}.pem"
        path.write_bytes(certificate)
        context.load_cert_chain(path)
        path.unlink()
    return context


def _forge(claimed: Identity, proof: bytes | None = None, *, signer: Identity | None = None, days: int = 1) -> bytes:
    """A certificate that claims to be `claimed`'s, PEM with its key; by default signed by somebody else."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if proof is None:
        signature = (signer or Identity.generate()).sign(tls_certificates._SIGNED + public)
        proof = tls_certificates._HEAD + tls_certificates._protobuf(claimed.peer) + tls_certificates._MIDDLE + signature
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=3))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    if proof:
        builder = builder.add_extension(x509.UnrecognizedExtension(tls_certificates.EXTENSION, proof), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    return certificate.public_bytes(Encoding.PEM) + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode().partition("-----BEGIN PRIVATE")[0])


VICTIM = Identity.from_seed(bytes(32))


@pytest.mark.parametrize(
    "certificate",
    [
        pytest.param(None, id="no certificate"),
        pytest.param(lambda: _forge(VICTIM), id="another peer's id"),
        pytest.param(lambda: _forge(VICTIM, b""), id="no extension"),
        pytest.param(lambda: _forge(VICTIM, b"\x30\x82\xff\xff" + bytes(300)), id="a malformed extension"),
        pytest.param(lambda: _forge(VICTIM, signer=VICTIM, days=-1), id="out of date"),
    ],
)
async def test_a_caller_that_cannot_prove_who_it_is(certificate: object) -> None:
    context = _context(certificate() if callable(certificate) else None)
    async with listener() as held:
        reader, writer = await asyncio.open_connection("127.0.0.1", held.port, ssl=context, server_hostname="")
        writer.write(FRAME * 10)
        await _refused(reader, writer)
        assert (held.let_in, held.frames) == ([], 0)


async def test_plaintext() -> None:
    async with listener() as held:
        for data in (FRAME * 10, b"GET / HTTP/1.1\r\n\r\n", bytes(100)):
            reader, writer = await asyncio.open_connection("127.0.0.1", held.port)
            writer.write(data)
            await _refused(reader, writer)
        assert (held.let_in, held.frames) == ([], 0)


async def test_an_older_tls_and_another_protocol() -> None:
    _, good = contexts(Identity.generate())
    async with listener() as held:
        good.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("127.0.0.1", held.port, ssl=good, server_hostname="")
        await _refused(reader, writer)
        old = _context()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.open_connection("127.0.0.1", held.port, ssl=old, server_hostname="")
        assert held.let_in == []


async def test_frames_before_the_handshake_and_a_replayed_handshake() -> None:
    """A member records its own handshake and replays it on a second connection."""
    member = Identity.generate()
    _, context = contexts(member)
    async with listener() as held:
        reader, writer = await asyncio.open_connection("127.0.0.1", held.port, ssl=context, server_hostname="")
        nonce = (await reader.readexactly(33))[1:]
        ours = bytes(32)
        proof = public_authenticator(b"dial", nonce, ours, held.transport.peer.encode(), member.peer.encode())
        handshake = bytes([64]) + ours + proof
        writer.write(handshake + FRAME)
        assert len(await reader.readexactly(33)) == 33
        await asyncio.sleep(0.05)
        assert (held.let_in, held.frames) == ([member.peer], 1)
        writer.close()
        for said in (handshake + FRAME * 5, FRAME * 20, bytes([64]) + bytes(64) + FRAME, b"\xff" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", held.port, ssl=context, server_hostname="")
            writer.write(said)
            await _refused(reader, writer)
        assert (held.let_in, held.frames) == ([member.peer], 1)


async def test_another_networks_secret() -> None:
    async with listener(SwarmSecret("correct horse battery")) as held:
        for authenticator in (public_authenticator, SwarmSecret("correct horse batterz").authenticate):
            outsider = await TlsTransport.start(Identity.generate(), authenticator=authenticator)
            with pytest.raises(PeerUnreachable, match="secret"):
                await outsider.dial(held.transport.peer, held.transport.addresses)
            await outsider.close()
        member = await TlsTransport.start(
            Identity.generate(), authenticator=SwarmSecret("correct horse battery").authenticate
        )
        await (await member.dial(held.transport.peer, held.transport.addresses)).send(Ping(1))
        await asyncio.sleep(0.05)
        assert (held.let_in, held.frames) == ([member.peer], 1)
        await member.close()
    with pytest.raises(UsageError, match="12"):
        SwarmSecret("too short")


async def test_a_listener_that_is_somebody_else_or_not_of_the_swarm() -> None:
    """The caller checks as well: it sends nothing to whoever answers at the victim's address."""
    heard = bytearray()
    answers = iter((b"", b"\x20" + bytes(32) + b"\x20" + bytes(32), b"\xff" * 50))

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(next(answers))
            while data := await reader.read(1000):
                heard.extend(data)
        writer.close()

    liar = Identity.generate()
    server_tls, _ = contexts(liar)
    server = await asyncio.start_server(impostor, "127.0.0.1", 0, ssl=server_tls)
    port = server.sockets[0].getsockname()[1]
    caller = await TlsTransport.start(Identity.generate())
    with pytest.raises(PeerUnreachable, match="answered instead"):
        await caller.dial(VICTIM.peer, [f"/ip4/127.0.0.1/tcp/{port}/tls/p2p/{VICTIM.peer}"])
    assert not heard
    for _ in range(2):
        with pytest.raises(PeerUnreachable):
            await caller.dial(liar.peer, [f"/ip4/127.0.0.1/tcp/{port}/tls/p2p/{liar.peer}"])
    assert FRAME not in heard
    await caller.close()
    server.close()


async def test_no_frame_of_a_thousand_untrusted_peers_is_read() -> None:
    no_certificate, forged = _context(), _context(_forge(VICTIM))
    async with listener() as held:

        async def attempt(context: ssl.SSLContext | None) -> None:
            name = None if context is None else ""
            reader, writer = await asyncio.open_connection("127.0.0.1", held.port, ssl=context, server_hostname=name)
            writer.write(FRAME * 50)
            await _refused(reader, writer)

        for context in (None, no_certificate, forged, None, no_certificate) * 4:
            await attempt(context)
        assert (held.let_in, held.frames) == ([], 0)


def test_certificates_are_those_of_libp2p(tmp_path: Path) -> None:
    """py-libp2p verifies ours and we verify its. In a process of its own: it and hivemind do not share one."""
    script = """
import sys
from cryptography import x509
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.security.tls.certificate import create_cert_template, generate_certificate, verify_certificate_chain
pair = create_new_key_pair(bytes(range(32)))
print(generate_certificate(pair.private_key, create_cert_template())[0])
print(ID.from_pubkey(verify_certificate_chain([x509.load_pem_x509_certificate(sys.stdin.buffer.read())])))
"""
    ours, _ = make_certificate(VICTIM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], input=ours, capture_output=True, check=True, cwd=tmp_path
    )
    theirs, _, seen = done.stdout.decode().strip().rpartition("\n")
    assert seen == VICTIM.peer
    assert peer_id_of_certificate(ssl.PEM_cert_to_DER_cert(theirs.strip())) == Identity.from_seed(bytes(range(32))).peer


def test_damage_to_a_certificate_is_noticed_and_never_makes_another_peer_of_it() -> None:
    good = _der(make_certificate(VICTIM)[0])
    assert peer_id_of_certificate(good) == VICTIM.peer
    unnoticed = 0
    for i in range(len(good)):
        for bit in (0x01, 0x80):
            damaged = bytearray(good)
            damaged[i] ^= bit
            try:
                peer = peer_id_of_certificate(bytes(damaged))
            except ProtocolError:
                continue
            unnoticed += 1
            assert peer == VICTIM.peer
    assert unnoticed <= 1, "only DER's count of unused bits after the signature may vary"
    for data in (b"", b"\x30", good[:-1], good + bytes(5000), bytes(500)):
        with pytest.raises(ProtocolError):
            peer_id_of_certificate(data)


async def test_a_connection_is_of_no_use_after_its_peer_broke_the_protocol() -> None:
    async with listener() as held:
        caller = await TlsTransport.start(Identity.generate())
        connection = await caller.dial(held.transport.peer, held.transport.addresses)
        connection._transport.write(b"\xff" * 8)  # type: ignore[attr-defined]
        with pytest.raises(ConnectionLost):
            await connection.receive()
        assert held.frames == 0
        await caller.close()
