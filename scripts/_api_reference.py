"""Write docs/api, the API reference, from docstrings as Markdown.

griffe reads the sources without importing them. The README's tables of commands and recipes are written here, too.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

from trainer.arguments import ARGUMENTS, to_python
from trainer.cli import commands
from trainer.cli.keys import description

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "api"

PAGES = {
    "trainer": ("trainer", "The Trainer and its related classes."),
    "callbacks": ("trainer.callbacks", "Callbacks of this package. Lightning's callbacks work, too."),
    "precision": ("trainer.precision", "Precision plugins: how a forward is computed and whether its loss is scaled."),
    "errors": ("trainer.errors", "Exceptions and warnings."),
    "recipes": ("recipes", "LightningModules and LightningDataModules of the recipes."),
}
"""Page name: the module with the public names, and the first line of the page."""

_CALLED_BY_LIGHTNING = re.compile(
    r"on_\w+|setup|teardown|state_dict|load_state_dict|state_key|\w+_step|\w+_dataloader|configure_\w+|forward"
    r"|prepare_data|transfer_batch_to_device"
)
"""Methods that are not called by users."""


def write() -> None:
    """Write all pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    file = ROOT / "README.md"
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the text of every page, by its name."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], docstring_parser="google", allow_inspection=False)
    packages = {name: loader.load(name) for name in ("trainer", "recipes")}
    loader.resolve_aliases(external=False)
    texts = {}
    listed = []
    for name, (module, about) in PAGES.items():
        package, _, rest = module.partition(".")
        objects = list(_public(packages[package][rest] if rest else packages[package]))
        texts[name] = "\n\n".join([f"# {module}", about, *(_object(each) for each in objects)]) + "\n"
        names = ", ".join(f"[`{each}`]({name}.md#{anchor})" for each, anchor in _anchors(texts[name]))
        listed.append(f"## {module}\n\n{about}\n\n{names}")
    introduction = (
        "The public names, written from their docstrings by `scripts/make_api_reference`. Their use is described in"
        " the [guides](../index.md). Settings of the command line are in [`conf`](../../conf/amp_trainer.yaml)."
    )
    texts["index"] = "\n\n".join(["# API reference", introduction, *listed]) + "\n"
    return texts


def _anchors(page: str) -> Iterator[tuple[str, str]]:
    """Return the names that a page documents, and their link anchors. A repeated name gets a suffix, such as ``-1``."""
    met = Counter[str]()
    for marks, name in re.findall(r"^(##+) (\w+)$", page, re.MULTILINE):
        anchor = name.lower()
        if marks == "##":
            yield name, f"{anchor}-{met[anchor]}" if met[anchor] else anchor
        met[anchor] += 1


def with_tables(readme: str) -> str:
    """Return the README with updated tables."""
    summaries = {name: command.summary for name in commands.names() if (command := commands.find(name))}
    recipes = {path.stem: description(path) for path in sorted((ROOT / "conf" / "recipe").glob("*.yaml"))}
    for name, rows in (("commands", summaries), ("recipes", recipes)):
        lines = "\n".join([f"| {name[:-1]} | |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in rows.items())])
        start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
        before, _, rest = readme.partition(start)
        readme = f"{before}{start}\n{lines}\n{end}{rest.partition(end)[2]}"
    return readme


def _public(module: griffe.Object | griffe.Alias) -> Iterator[griffe.Object]:
    """Return the exported classes and functions of a module, or of all modules of a package without ``__all__``."""
    exported = [str(name) for name in module.exports or ()]
    if isinstance(homes := getattr(module.members.get("_HOMES"), "value", None), griffe.ExprDict):
        exported = exported or [str(name).strip("'\"") for name in homes.keys]  # __all__ = list(_HOMES)
    if not exported and module.is_init_module:
        for part in sorted(module.modules.values(), key=lambda each: each.name):
            yield from _public(part)
        return
    own = [name for name, member in module.members.items() if not member.is_alias and not name.startswith("_")]
    for name in exported or own:
        member = module.members[name]
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if (target.is_class or target.is_function) and target.docstring:
            yield target


def _object(each: griffe.Object) -> str:
    place = each.filepath.relative_to(ROOT).as_posix()
    parts = [f"## {each.name}", f"`{each.path}`, in [{place}](../../{place})"]
    if isinstance(each, griffe.Class):
        bases = [str(base) for base in each.bases]
        if bases:
            parts[1] += f"; a {', '.join(f'`{base}`' for base in bases)}"
        constructor = each.members.get("__init__")
        parameters = constructor if isinstance(constructor, griffe.Function) else None
        meanings = {name: one.meaning for name, one in ARGUMENTS.items()} if each.name == "Trainer" else {}
        parts.append(_docstring(each, parameters, {name: to_python(text) for name, text in meanings.items()}))
        parts += [_method(member) for name, member in each.members.items() if _is_shown(name, member)]
    elif isinstance(each, griffe.Function):
        parts += [f"`{_call(each)}`", _docstring(each, each)]
    return "\n\n".join(part for part in parts if part)


def _is_shown(name: str, member: griffe.Object | griffe.Alias) -> bool:
    if name.startswith("_") or _CALLED_BY_LIGHTNING.fullmatch(name) or not member.docstring:
        return False
    return member.is_function or (member.is_attribute and "property" in member.labels)


def _method(member: griffe.Object | griffe.Alias) -> str:
    if isinstance(member, griffe.Function):
        return f"### {member.name}\n\n`{_call(member)}`\n\n{_docstring(member, member)}"
    kind = f", `{member.annotation}`" if isinstance(member, griffe.Attribute) and member.annotation else ""
    return f"### {member.name}\n\nA property{kind}.\n\n{_docstring(member, None)}"


def _call(function: griffe.Function) -> str:
    """Return the signature with names and defaults. The types are in the table."""
    words = []
    starred = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not starred:
            words.append("*")
            starred = True
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        starred = starred or prefix == "*"
        default = "" if parameter.default is None or prefix else f"={parameter.default}"
        words.append(f"{prefix}{parameter.name}{default}")
    return f"{function.name}({', '.join(words)})"


def _docstring(
    each: griffe.Object | griffe.Alias, called: griffe.Function | None, meanings: Mapping[str, str] | None = None
) -> str:
    """Format the sections of a docstring.

    Args:
        each: the documented object.
        called: the callable with the parameters, their types and defaults.
        meanings: descriptions of parameters that the docstring does not mention.
    """
    parts = []
    described = dict(meanings or {})
    assert each.docstring is not None
    prose = {"returns_multiple_items": False, "returns_named_value": False}  # a return value is one paragraph
    for section in each.docstring.parse("google", warnings=False, **prose):
        if section.kind is griffe.DocstringSectionKind.parameters:
            described |= {item.name: item.description for item in section.value}
        elif section.kind is griffe.DocstringSectionKind.text:
            parts.append(_text(section.value))
        elif section.kind is griffe.DocstringSectionKind.examples:
            parts.append("\n".join(["```text", *(str(text) for _, text in section.value), "```"]))
        elif section.kind is griffe.DocstringSectionKind.attributes:
            rows = [(f"`{item.name}`", _line(item.description)) for item in section.value]
            parts.append(_table(("attribute", ""), rows))
        elif section.kind is griffe.DocstringSectionKind.raises:
            rows = [(f"`{item.annotation}`", _line(item.description)) for item in section.value]
            parts.append(_table(("raises", "when"), rows))
        elif section.kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields):
            word = section.kind.value.capitalize()
            parts += [f"{word}: {_line(item.description)}" for item in section.value]
    if called is not None:
        parts.insert(1, _parameters(called, described))
    return "\n\n".join(part for part in parts if part)


def _parameters(function: griffe.Function, described: dict[str, str]) -> str:
    by_name = {name.strip(): text for names, text in described.items() for name in names.split(",")}
    rows = []
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        default = "" if parameter.default is None else f"`{parameter.default}`"
        kind = "" if parameter.annotation is None else f"`{parameter.annotation}`"
        text = by_name.get(parameter.name.lstrip("*")) or by_name.get(f"*{parameter.name}")
        text = text or by_name.get(f"**{parameter.name}", "")
        rows.append((f"`{parameter.name}`", kind, default, _line(text)))
    return _table(("argument", "type", "default", ""), rows) if rows else ""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def _line(text: str) -> str:
    return " ".join(_inline(text).split())


def _inline(text: str) -> str:
    """Convert the inline mark-up of docstrings to Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _text(text: str) -> str:
    """Format paragraphs. A block after ``::`` becomes a fenced one."""
    lines = _inline(inspect.cleandoc(text)).replace("::\n", ":\n").splitlines()
    parts: list[str] = []
    fenced = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not fenced and not lines[number - 1].strip():
            parts.append("```text")
            fenced = True
        elif fenced and line.strip() and not indented:
            while not parts[-1]:
                parts.pop()
            parts += ["```", ""]
            fenced = False
        parts.append(line[4:] if fenced else line)
    return "\n".join([*parts, "```"] if fenced else parts)
