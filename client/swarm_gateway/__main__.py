"""`python -m swarm_gateway`."""

from swarm_gateway.server.cli import main

if __name__ == "__main__":
    main()
