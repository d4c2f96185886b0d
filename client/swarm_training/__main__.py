"""`swarm-draft`, and `python -m swarm_training`: says in one sentence what is not installed."""

from swarm.command_line import program


def main() -> None:
    with program.packages_of_nodes("swarm-draft"):
        from swarm_training.cli import main as run

        run()


if __name__ == "__main__":
    main()
