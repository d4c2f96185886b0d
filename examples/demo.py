"""Three node processes find each other through a DHT, split a model among themselves and answer a question.

    python examples/demo.py ["a question"] [--chat] [--nodes N]

Starts `swarm-node local`, waits until every layer is served, sends a request with `swarm-chat`, and stops
what it started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

QUESTION = "Name three things that bees do, one short sentence each."
BIN = Path(sys.executable).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--chat", action="store_true", help="an interactive terminal instead of one question")
    parser.add_argument("--nodes", type=int, default=3)
    args = parser.parse_args()

    command = [str(BIN / "swarm-node"), "local", "--nodes", str(args.nodes), "--json"]
    # A session of its own: Ctrl-C in the chat must stop an answer and not the swarm.
    local = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        peers = wait_until_ready(local)
        if not peers:
            return local.wait()
        chat = [str(BIN / "swarm-chat"), "--peer", peers[0]]
        if not args.chat:
            print(f"\n>>> {args.question}\n", flush=True)
            chat += ["--greedy", "--max-new-tokens", "160", "--prompt", args.question]
        return subprocess.run(chat, check=False).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        if local.poll() is None:
            os.kill(local.pid, signal.SIGTERM)
        local.communicate()


def wait_until_ready(local: subprocess.Popen[str]) -> list[str]:
    """Print each node's events until the swarm can answer; -> its addresses, or none if it failed."""
    assert local.stdout is not None
    for line in local.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            return list(event["peers"])
        text = describe(event)
        if text:
            print(f"[node {event['node']}, {event['seconds']:.1f} s] {text}", flush=True)
    return []


def describe(event: dict[str, Any]) -> str:
    match event["event"]:
        case "started":
            return f"is {event['peer'][-6:]}; its memory holds {event['layer_capacity']} layers"
        case "placed":
            return f"takes {event['reason']}"
        case "serving":
            return f"serves layers {event['start']}:{event['end']} at {event['layer_ms']:.2f} ms a layer"
        case _:
            return ""


if __name__ == "__main__":
    sys.exit(main())
