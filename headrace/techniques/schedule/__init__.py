"""Hold the techniques that vary something in time."""
