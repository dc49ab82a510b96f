"""What stays on a disk is written by core.files, which a kill or a power cut leaves whole."""

import ast
from collections.abc import Iterator

WRITES = {"write_text", "write_bytes", "rename", "replace", "move", "savez", "dump"}
"""Methods that make or rename a file, where what they are called on is no text."""
ALLOWED = {
    "headrace.core.files.publish": "it is what syncs and renames",
    "headrace.core.files.write_whole": "aside, which it publishes",
    "headrace.export.hf.export_hf": "aside, which is published as a folder",
    "headrace.export.edge.EdgeExport.write": "aside, which is published as a folder",
    "headrace.export.folder.write_json": "aside, which is published as a folder",
    "headrace.export.measured.GrownMemory.__init__": "the file by which Linux forgets a peak",
    "headrace.train.checkpoint.Checkpoints._unfollow": "a link becomes the checkpoint it names",
    "headrace.train.checkpoint.Checkpoints._point": "a link, which holds no content",
    "headrace.train.checkpoint.Checkpoints._discard": "on its way out",
    "headrace.techniques.memory.dynamic_batch": "the plan of a trial, in a folder that goes",
}
"""Where it is called otherwise, with the reason."""


def calls(tree: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    """Every call of WRITES on a path or on `os`, with the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        inner = path
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{path}.{node.name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, ast.unparse(node.func.value)
            files = owner in ("os", "shutil") or name.startswith("write_")
            if name in WRITES and (
                files or (len(node.args) == 1 and name in ("rename", "replace"))
            ):
                yield path, f"{owner}.{name}"
        yield from calls(node, inner)


def test_nothing_that_stays_is_written_or_renamed_elsewhere(trees: dict[str, ast.Module]) -> None:
    found = [call for module, tree in trees.items() for call in calls(tree, module)]
    assert len(found) > 6
    allowed = {
        where: [known for known in ALLOWED if f"{where}.".startswith(f"{known}.")]
        for where, _ in found
    }
    assert [call for call in found if not allowed[call[0]]] == []
    assert {known for names in allowed.values() for known in names} == {*ALLOWED}, "one is stale"
