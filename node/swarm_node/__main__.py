"""`python -m swarm_node`."""

from swarm_node.commands.cli import main

if __name__ == "__main__":
    main()
