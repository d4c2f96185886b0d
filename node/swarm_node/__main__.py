"""`swarm-node`, and `python -m swarm_node`: says in one sentence what is not installed."""

from swarm.command_line import program


def main() -> None:
    with program.packages_of_nodes("swarm-node"):
        from swarm_node.commands.cli import main as run

        run()


if __name__ == "__main__":
    main()
