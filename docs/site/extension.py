"""What the site needs in addition to Sphinx: navigation, docstrings, reference of commands."""

import re
import tomllib
from pathlib import Path
from typing import Any

import notebooks
import typer
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective
from sphinx.util.rst import escape

import treadle
from treadle.cli import app as commands

NAVIGATION = tomllib.loads((Path(__file__).parent / "navigation.toml").read_text())


def exclude_pages(app: Sphinx, config: Config) -> None:
    """Exclude the pages that are not in the navigation on purpose."""
    config.exclude_patterns += [f"{page}.md" for page in NAVIGATION["excluded"]]


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the landing page, whose file stays plain Markdown for GitHub."""
    if page != app.config.root_doc:
        return
    for section in NAVIGATION["section"]:
        options = [":hidden:", f":caption: {section['title']}"]
        lines = ["```{toctree}", *options, "", *section["pages"], "```"]
        source[0] += "\n\n" + "\n".join(lines) + "\n"


def adapt_docstring(
    app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Turn the Markdown that docstrings use into reStructuredText, before napoleon reads them.

    A text in single backticks becomes a link if it is a name, else code. What a function returns is
    described in words only, its type is in the signature: without the colon in front, napoleon
    would take the words before the first colon for a type.
    """
    text = re.sub(r"(?<![`:\w])`([^`\n]+(?:\n[^`\n]+)?)`(?!`)(\w?)", adapted_code, "\n".join(lines))
    lines[:] = text.split("\n")
    for number in range(1, len(lines)):
        if re.fullmatch(r"\s*(Returns|Yields):", lines[number - 1]):
            lines[number] = re.sub(r"^(\s*)", r"\1: ", lines[number])


def adapted_code(found: re.Match[str]) -> str:
    """Return a text in backticks as a link or as code, and what follows it without a space."""
    text, following = found.groups()
    role = f":py:obj:`{text}`" if re.fullmatch(r"[A-Za-z_][\w.]*", text) else f"``{text}``"
    return f"{role}\\ {following}" if following else role


ALSO_IN = {
    "treadle.core.hook": "treadle",
    "treadle.report.saved_run": "treadle",
    "treadle.exporting.exported": "treadle",
}


def add_anchors(app: Sphinx, tree: nodes.document) -> None:
    """Give some entries anchors under a second name.

    They are documented under the names of their own modules, and `clip_by_global_norm` under its
    shorter name. viewcode expects everything in a module under one name when it links from the
    source back to the reference.
    """
    for signature in tree.findall(addnodes.desc_signature):
        name, module = signature.get("fullname"), ALSO_IN.get(signature.get("module"))
        if name == "clip_by_global_norm":
            module = "treadle.transforms"
        if module is not None:
            signature["ids"].append(f"{module}.{name}")


def skip_hook_methods(
    app: Sphinx, what: str, name: str, member: Any, skipped: bool, options: Any
) -> bool | None:
    """Leave out what a hook that comes with Treadle implements of the interface of all hooks."""
    if getattr(member, "__module__", "").startswith("treadle.hooks.") and what == "class":
        return hasattr(treadle.DetailedHook, name) or None
    return None


class Commands(SphinxDirective):
    """Describe each command of `treadle`, with the texts of its `--help`."""

    def run(self) -> list[Any]:
        """Return the descriptions as nodes."""
        group: Any = typer.main.get_command(commands)
        lines = described("treadle", group)
        for name, command in group.commands.items():
            if not command.hidden:
                title = f"treadle {name}"
                lines += ["", title, "-" * len(title), "", *described(title, command)]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def described(name: str, command: Any) -> list[str]:
    """Return the usage, the help text and the options of a command as reStructuredText."""
    context = command.context_class(command, info_name=name)
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = [".. code-block:: text", "", f"   {usage}", ""]
    for paragraph in f"{command.help or ''}\n\n{command.epilog or ''}".strip().split("\n\n"):
        text, _, examples = paragraph.partition("Examples:\n")
        if text.strip():
            lines += [escape(" ".join(text.split())), ""]
        if examples:
            lines += [".. code-block:: sh", ""]
            lines += [f"   {line.strip()}" for line in examples.splitlines()] + [""]
    return [*lines, f".. program:: {name}", "", *described_options(command, context)]


def described_options(command: Any, context: Any) -> list[str]:
    """Return the arguments and options of a command as reStructuredText, by their groups."""
    lines: list[str] = []
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:  # None: it is hidden
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(parameter.rich_help_panel or default, []).append(record)
    for group, records in groups.items():
        lines += [f".. rubric:: {escape(group)}", ""]
        for shown, text in records:
            lines += [f".. option:: {shown}", "", f"   {escape(text)}", ""]
    return lines


def setup(app: Sphinx) -> dict[str, bool]:
    """Register everything with Sphinx."""
    app.add_directive("treadle-commands", Commands)
    app.connect("config-inited", exclude_pages)
    app.connect("source-read", add_navigation)
    app.connect("source-read", notebooks.add_link)
    app.connect("build-finished", notebooks.write_notebooks)
    app.connect("autodoc-skip-member", skip_hook_methods)
    app.connect("doctree-read", add_anchors)
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)  # napoleon has 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
