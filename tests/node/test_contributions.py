"""The ledger of what a node has given: bounded, kept over restarts, and no damaged file stops a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UsageError
from swarm.net.security.identity import Identity
from swarm.receipts import Receipt
from swarm_node.owner.contributions import ContributionLedger, LedgerPolicy, owner_peer


def receipt(client: str, tokens: int = 10) -> Receipt:
    return Receipt("node", client, b"s" * 16, tokens, 4, 1e9)


def test_what_was_given_outlives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ledger.json"
    ledger = ContributionLedger(file)
    ledger.save()
    assert not file.exists(), "nothing was done"
    ledger.served(100, 1.5, 2000)
    ledger.acknowledge("a", receipt("a"), 5.0)
    ledger.acknowledge("a", receipt("a"), 9.0)
    ledger.save()
    again = ContributionLedger(file).given
    assert (again.layer_tokens, again.compute_s, again.sent_bytes) == (100, 1.5, 2000)
    assert (again.acknowledged, again.receipts) == (80, 2)
    entry = again.clients["a"]
    assert (entry.first, entry.last, entry.receipts, entry.layer_tokens) == (5.0, 9.0, 2, 80)
    assert [path.name for path in file.parent.iterdir()] == ["ledger.json"]


def test_the_clients_that_were_here_longest_ago_are_forgotten_first() -> None:
    ledger = ContributionLedger(policy=LedgerPolicy(max_clients=3))
    for number in range(5):
        ledger.acknowledge("faithful", receipt("faithful"), float(number))
        ledger.acknowledge(f"new {number}", receipt("new"), float(number))
    assert sorted(ledger.given.clients) == ["faithful", "new 3", "new 4"]
    assert ledger.given.acknowledged == 10 * 40


@pytest.mark.parametrize("content", [b"", b"{", b'{"layer_tokens": -1}', b"[" * 100_000, b'{"clients": {"a": 1}}'])
def test_a_damaged_file_starts_anew(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ledger.json"
    file.write_bytes(content)
    assert ContributionLedger(file).given.layer_tokens == 0


def test_an_owner_is_named_by_peer_id_or_identity_file(tmp_path: Path) -> None:
    identity = Identity.from_seed(b"o" * 32)
    identity.save(tmp_path / "me.key")
    assert owner_peer(str(tmp_path / "me.key")) == owner_peer(identity.peer) == identity.peer
    with pytest.raises(UsageError, match="neither a peer id nor"):
        owner_peer("nobody")
