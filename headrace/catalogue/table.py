"""List the catalogue as rows."""

from headrace.plan.technique import Catalogue


def catalogue_rows(catalogue: Catalogue) -> list[dict[str, str]]:
    """Return one row per technique: name, room, what it is."""
    return [
        {
            "technique": name,
            "room": technique.room,
            "what": technique.line(),
        }
        for name, technique in catalogue.techniques.items()
    ]
