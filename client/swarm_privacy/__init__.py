"""`swarm-privacy`: what hidden states give away of the text behind them, measured by attacking our own."""
