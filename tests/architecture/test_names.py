"""Check that a class's name has one meaning in the package."""

import ast
from collections import defaultdict


def _defined(tree: ast.Module) -> tuple[list[str], list[str]]:
    """Return the names of a module's classes, nested ones too, and of its type aliases.

    An alias is a name in CamelCase that the module assigns on its top level.
    """
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return classes, [n for n in names if n[0].isupper() and not n.isupper()]


def test_a_class_name_has_one_meaning(trees: dict[str, ast.Module]) -> None:
    classes, aliases = defaultdict(list), defaultdict(list)
    for module, tree in trees.items():
        for found, names in zip((classes, aliases), _defined(tree), strict=True):
            for name in names:
                found[name].append(module)
    assert len(classes) > 400 and len(aliases) > 50, "the scan finds classes and aliases"
    twice = {name: rooms for name, rooms in classes.items() if len(rooms) > 1}
    assert twice == {}, "rename all but one"
    both = {n: classes[n] + aliases[n] for n in classes.keys() & aliases.keys()}
    assert both == {}, "an alias has the name of a class: rename the alias"
