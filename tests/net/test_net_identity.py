"""Identities: equality with py-libp2p's arithmetic, the file's life, hostile peer ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import IdentityError, ProtocolError
from swarm.net.security.identity import Identity, public_key, verify

_LIBP2P = """
import json, sys
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.pb import crypto_pb2
from libp2p.peer.id import ID
out = []
for seed in json.load(sys.stdin):
    pair = create_new_key_pair(bytes.fromhex(seed))
    private = crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519,
                                    data=pair.private_key.to_bytes() + pair.public_key.to_bytes())
    out.append([ID.from_pubkey(pair.public_key).to_base58(), private.SerializeToString().hex(),
                pair.private_key.sign(b"data").hex()])
json.dump(out, sys.stdout)
"""


@pytest.mark.slow
def test_ids_files_and_signatures_are_those_of_libp2p() -> None:
    seeds = [bytes([i]) * 32 for i in range(20)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LIBP2P],
        input=json.dumps([s.hex() for s in seeds]),
        capture_output=True,
        text=True,
        check=True,
    )
    for seed, (peer, private, signature) in zip(seeds, json.loads(done.stdout), strict=True):
        identity = Identity.from_seed(seed)
        assert identity.peer == peer
        assert identity.to_bytes().hex() == private
        assert identity.sign(b"data").hex() == signature
        assert verify(peer, b"data", bytes.fromhex(signature))


def test_signatures_are_checked() -> None:
    a, b = Identity.generate(), Identity.generate()
    signature = a.sign(b"data")
    assert verify(a.peer, b"data", signature)
    assert not verify(b.peer, b"data", signature)
    assert not verify(a.peer, b"date", signature)
    assert not verify(a.peer, b"data", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not verify(a.peer, b"data", b"")
    assert not verify("", b"data", signature)


@pytest.mark.parametrize(
    "peer",
    ["", "a", "0OIl", "Qm" + "a" * 44, "12D3KooW", "1" * 60, "z" * 64, "é", "x" * 100_000, "12D3KooW" + "z" * 44],
)
def test_what_is_not_an_ed25519_peer_id_is_refused(peer: str) -> None:
    with pytest.raises(ProtocolError):
        public_key(peer)


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(path).peer == first.peer
    path.chmod(0o644)
    assert Identity.load(path).peer == first.peer
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = Identity.load_or_create(path)
    with pytest.raises(FileExistsError):
        Identity.generate().save(path)
    assert Identity.load(path).peer == first.peer


@pytest.mark.parametrize("damage", ["empty", "short", "long", "flipped", "text"])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "identity"
    good = Identity.generate().to_bytes()
    data = {
        "empty": b"",
        "short": good[:-1],
        "long": good + b"\0",
        "flipped": good[:10] + bytes([good[10] ^ 1]) + good[11:],
        "text": b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
    }[damage]
    path.write_bytes(data)
    with pytest.raises(IdentityError, match=str(path)):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path / "file" / "identity")
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path)
