"""OpenAI's and Anthropic's HTTP APIs in front of a swarm, and a page to use and watch it. Uses SwarmClient alone."""
