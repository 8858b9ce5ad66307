"""MkDocs hook: pages and data that live outside docs/ become part of the site, and links to them are theirs there."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "SECURITY.md": "SECURITY.md", "CHANGELOG.md": "CHANGELOG.md"}  # in the site


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for data in sorted((ROOT / "benchmarks").rglob("*.csv")):
        files.append(File.generated(config, data.relative_to(ROOT).as_posix(), abs_src_path=str(data)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are between the pages of the site, which is flat."""
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](")
    for source, target in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return markdown.replace("](../benchmarks/", "](benchmarks/")
