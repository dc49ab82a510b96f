"""This package makes a build from a plan: its sockets, what fills them, and where it runs."""
