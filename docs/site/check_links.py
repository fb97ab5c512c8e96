"""Check a built site: every internal link and anchor exists, and no page requests another host.

Usage: python check_links.py FOLDER
"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser requests by itself; a link that a reader clicks may lead to another host.
REQUESTED = {
    ("img", "src"),
    ("script", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
}
ELSEWHERE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)")


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the links and anchors of a tag."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append((tag, name, value))


@cache
def parsed(path: Path) -> Page:
    """Return a page of the site."""
    return Page(path.read_text())


def faults(root: Path, path: Path) -> list[str]:
    """Return what is wrong with the links of a page."""
    found: list[str] = []
    for tag, name, link in parsed(path).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if (tag, name) in REQUESTED and parts.scheme != "data":
                found.append(f"<{tag}> requests {link}")
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_relative_to(root) or not target.is_file():
            found.append(f"no such file: {link}")
        elif parts.fragment and target.suffix == ".html":
            anchors = parsed(target).anchors | {"top"}  # browsers know "top"
            if unquote(parts.fragment) not in anchors:
                found.append(f"no such anchor: {link}")
    return found


def main(folder: str) -> int:
    """Print what is wrong with a site, and return the exit code."""
    root = Path(folder).resolve()
    pages = sorted(root.rglob("*.html"))
    found = [f"{page.relative_to(root)}: {fault}" for page in pages for fault in faults(root, page)]
    for sheet in sorted(root.rglob("*.css")):
        for link in ELSEWHERE.findall(sheet.read_text()):
            found.append(f"{sheet.relative_to(root)}: requests {link}")
    print("\n".join(found) or f"{len(pages)} pages: all internal links and anchors exist")
    if not pages:
        print(f"check_links: {folder} holds no page: build the site first")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
