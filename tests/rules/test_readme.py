"""The tree in README is the tree on disk."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def tree_entries(text: str) -> list[str]:
    block = re.search(r"```\nsrc/rotaryquant\n(.*?)```", text, re.S)
    assert block is not None, "README has no tree"
    return re.findall(r"[├└]── (\S+)", block.group(1))


def test_readme_tree_is_the_tree_on_disk() -> None:
    listed = {name.rstrip("/") for name in tree_entries((REPOSITORY / "README.md").read_text(encoding="utf-8"))}
    package = REPOSITORY / "src" / "rotaryquant"
    found = {
        path.name
        for path in package.iterdir()
        if not path.name.startswith(("_native", "__")) and path.name not in ("py.typed",)
    }
    assert listed == found


def test_readme_names_files_that_exist() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (REPOSITORY / target).exists(), target
