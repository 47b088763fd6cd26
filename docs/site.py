"""What mkdocs calls while it makes the site: README.md and CONTRIBUTING.md, above docs/, are pages of it, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = ("examples/tour.ipynb",)  # what pages link to, as it is
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add what stands above docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to the pages lead to where they are on the site."""
    up = "../" * page.file.src_uri.count("/")
    for source, name in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{name}", markdown)
    return markdown
