"""`swarm-node` on the command line: flags, words, exit codes."""
