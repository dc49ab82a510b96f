"""This module loads the techniques that the verbs know."""

from typing import TYPE_CHECKING

from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.plan.technique import Catalogue


def catalogue() -> "Catalogue":
    """Return every technique and model family that is installed.

    The first call imports them all, and torch with them. A signal that comes during the
    import ends the command with one message.
    """
    with loading():
        from headrace.plan.technique import installed

        return installed()
