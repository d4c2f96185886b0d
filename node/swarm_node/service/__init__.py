"""The node as a service of its user: systemd's user manager on Linux, launchd on macOS."""
