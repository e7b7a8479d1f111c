"""Every tracked text: no conflict marker, and no link that leads nowhere."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
_MARKER = re.compile(r"^(?:<{7} .*|={7}|>{7} .*)$", re.MULTILINE)
_CODE = re.compile(r"^ {4}[^\n]*$|^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?)[ #]*$", re.MULTILINE)


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings: lower case, hyphens for spaces, numbered where they repeat."""
    found: set[str] = set()
    for heading in _HEADING.findall(
        re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        repeats = 0
        while (name := f"{slug}-{repeats}" if repeats else slug) in found:
            repeats += 1
        found.add(name)
    return found


def find_broken_links(page: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def test_no_tracked_text_has_a_conflict_marker() -> None:
    texts = {path: path.read_bytes().decode(errors="ignore") for path in tracked_files()}
    assert {
        str(path): found for path, text in texts.items() if (found := _MARKER.findall(text))
    } == {}


def test_every_relative_link_and_anchor_leads_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]
    assert pages
    assert {str(page): broken for page in pages if (broken := find_broken_links(page))} == {}
