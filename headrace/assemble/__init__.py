"""From a plan to a build: its sockets, what fills them, and where it would run."""
