"""A hook of MkDocs: the site's files are the repository's, at the paths that they have there.

So the links between pages are the same on GitHub, in an editor and on the site. MkDocs itself takes pages from one
folder only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PATTERNS = ("*.md", "docs/*.md", "docs/*.css", "bench/*.md", "bench/results/*", "examples/*.ipynb")


class Notebook(File):
    """A notebook as a page: its text, and its code in blocks."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def content_string(self) -> str:
        return "\n\n".join(map(_markdown, json.loads(super().content_string)["cells"]))


def _markdown(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    return text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    found: list[File] = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path in sorted(path for pattern in PATTERNS for path in root.glob(pattern)):
        kind = Notebook if path.suffix == ".ipynb" else File
        place = path.relative_to(root).as_posix()
        found.append(kind(place, str(root), config.site_dir, config.use_directory_urls))
    return Files(found)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Tables in `<details>` are tables, as on GitHub."""
    return markdown.replace("<details>", "<details markdown>")
