"""`swarm-privacy`, and `python -m swarm_privacy`: says in one sentence what is not installed."""

from swarm.command_line import program


def main() -> None:
    with program.packages_of_nodes("swarm-privacy"):
        from swarm_privacy.cli import main as run

        run()


if __name__ == "__main__":
    main()
