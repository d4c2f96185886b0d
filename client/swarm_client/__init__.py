"""Talk to a swarm: `SwarmClient`, its synchronous face and the terminal client. Never imports the node."""

from swarm_client.answer import Answer, Piece
from swarm_client.client import SwarmClient
from swarm_client.generation import TextStream
from swarm_client.request import Options
from swarm_client.sync import SyncSwarmClient

__all__ = ["Answer", "Options", "Piece", "SwarmClient", "SyncSwarmClient", "TextStream"]
