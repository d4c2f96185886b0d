"""`python -m swarm_client`."""

from swarm_client.cli.chat import main

if __name__ == "__main__":
    main()
