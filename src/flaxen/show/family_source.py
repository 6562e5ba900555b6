"""Families as text: how long each is, and a starting file for a new one."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import keyword
import re
from functools import cached_property

from flaxen.core.errors import InputError, did_you_mean
from flaxen.core.hugging_face import transformers
from flaxen.families import FILES


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The source of one file of families."""

    text: str

    @cached_property
    def statements(self) -> list[ast.stmt]:
        return ast.parse(self.text).body

    @cached_property
    def families(self) -> dict[str, ast.FunctionDef]:
        """Model type -> the function that builds it, in the order of the file."""
        functions = [node for node in self.statements if isinstance(node, ast.FunctionDef)]
        return {kind: node for node in functions for kind in _kinds(node)}

    def reached(self, model_type: str) -> list[ast.stmt]:
        """The statements that a family's function stands on, itself included, in their order."""
        named = {name: node for node in self.statements for name in _defined(node)}
        todo, found = [self.families[model_type]], []
        while todo:
            node = todo.pop()
            if node not in found:
                found.append(node)
                todo += [named[name] for name in sorted(_used(node)) if name in named]
        return [node for node in self.statements if node in found]

    def own(self, model_type: str) -> list[ast.stmt]:
        """Those that no family earlier in the file stands on."""
        earlier = list(self.families)[: list(self.families).index(model_type)]
        taken = [node for kind in earlier for node in self.reached(kind)]
        return [node for node in self.reached(model_type) if node not in taken]

    def code(self, node: ast.stmt) -> str:
        first, last = _span(node)
        return "\n".join(self.text.splitlines()[first - 1 : last])


def lineage(model_type: str) -> Lineage:
    """The file that holds a model type.

    Raises:
        InputError: for a type that no file holds.
    """
    if model_type not in FILES:
        raise InputError(f"No family {model_type!r}.{did_you_mean(model_type, FILES)}")
    file = importlib.import_module(f"flaxen.families.{FILES[model_type]}")
    return Lineage(inspect.getsource(file))


def length(model_type: str) -> int:
    """Lines of a family: its function, its names, and what else of its file only it and later ones
    use.
    """
    source = lineage(model_type)
    own = [_span(node) for node in source.own(model_type) if "FAMILIES" not in _defined(node)]
    return sum(last - first + 1 for first, last in own)


def starting_file(name: str, like: str) -> str:
    """A file for the family `name` that builds what `like` builds, to be changed from there.

    Raises:
        InputError: a name that is no model type or is taken; an unknown `like`.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name):
        raise InputError(f"{name!r} is no model type; expected letters, digits, _, . or -.")
    if name in FILES:
        raise InputError(f"There is a family {name!r} already, in families/{FILES[name]}.py.")
    source = lineage(like)
    parts, made = source.reached(like), source.families[like]
    used = {word for node in parts for word in _used(node)}
    imports = [line for node in source.statements if (line := _import(node, used))]
    body = [source.code(node) for node in parts]
    function = re.sub(r"\W", "_", name.lower())
    if keyword.iskeyword(function) or function in used.union(*map(_defined, source.statements)):
        function += "_family"
    last = re.sub(rf"\bdef {made.name}\(", f"def {function}(", source.code(made), count=1)
    body[parts.index(made)] = re.sub(rf'(FAMILIES,\s*)"{like}"', rf'\1"{name}"', last, count=1)
    imports = [f"{line}\n" if "__future__" in line else line for line in imports]
    head = f'"""{name}: say here how it differs from {like}."""\n\n' + "\n".join(imports)
    return "\n\n\n".join([head, *body]) + "\n\n" + _to_do(name, like)


def _to_do(name: str, like: str) -> str:
    """Which keys of the new config the other family does not know, as comments."""
    configs = transformers().CONFIG_MAPPING
    if name not in configs:
        return f"\n# transformers has no config class for {name!r}: this file needs one.\n"
    new, old = (configs[kind]().to_dict() for kind in (name, like))
    keys = sorted(key for key in new.keys() - old.keys() if not key.startswith("_"))
    if not keys:
        return f"\n# Its config has no keys that {like}'s lacks.\n"
    rows = "".join(f"#   {key} = {new[key]!r}\n" for key in keys)
    return f"\n# Keys of its config that {like}'s lacks, with their defaults:\n{rows}"


def _kinds(node: ast.FunctionDef) -> list[str]:
    """The model types that a function's decorators register."""
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
    named = [call.args[1] for call in calls if getattr(call.func, "id", "") == "family"]
    return [str(arg.value) for arg in named if isinstance(arg, ast.Constant)]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    targets = node.targets if isinstance(node, ast.Assign) else []
    each = [x for t in targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [x.id for x in each if isinstance(x, ast.Name)]


def _used(node: ast.stmt) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _span(node: ast.stmt) -> tuple[int, int]:
    """Its first and last line, decorators included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return first, node.end_lineno or node.lineno


def _import(node: ast.stmt, used: set[str]) -> str:
    """The part of an import that is used."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return ""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return ast.unparse(node)
    kept = [a for a in node.names if (a.asname or a.name).split(".")[0] in used]
    if not kept:
        return ""
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(kept))
    return ast.unparse(ast.ImportFrom(node.module, kept, node.level))
