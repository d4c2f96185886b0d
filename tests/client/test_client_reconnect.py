"""A client whose given peer is gone joins by a node that it knew before, over real libp2p hosts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from record_makers import LAYERS, MODEL, identity

from swarm import records
from swarm.config import Limits, state_dir
from swarm.errors import PeerUnreachable
from swarm.net.dht.directory import DhtDirectory
from swarm.net.gossip.record_file import RecordFile
from swarm.net.libp2p.options import HostOptions
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.types import LayerSpan, NodeProfile, NodeState
from swarm_client.network.connection import connect

pytestmark = pytest.mark.processes


async def test_a_stale_address_is_enough_for_a_client_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    gone = (f"/ip4/127.0.0.1/tcp/1/p2p/{identity(9).peer}",)
    node = identity(1)
    transport = await Libp2pTransport.start(node, HostOptions())
    try:
        directory = await DhtDirectory.start(transport)
        profile = NodeProfile(
            node.peer,
            "n",
            NodeState.SERVING,
            "fp32",
            "h",
            LAYERS,
            LayerSpan(0, LAYERS),
            tuple(transport.addresses),
            published_at=time.time(),
        )
        record, until = records.encode(profile, MODEL, LAYERS, 30.0, node.sign)
        await directory.publish(record, MODEL, until)
        with pytest.raises(PeerUnreachable):
            async with connect(gone, Limits(), model=MODEL):
                raise AssertionError("nobody is there")
        RecordFile.of(state_dir() / "records", MODEL, gone).save([(record, time.time())])
        async with connect(gone, Limits(), model=MODEL) as network:
            reader = network.record_reader(MODEL, LAYERS)
            assert [found.peer for found in (await reader.snapshot()).nodes] == [node.peer]
            await reader.close()
        await directory.close()
    finally:
        await transport.close()
