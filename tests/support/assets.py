"""Real models and texts, which are no part of the repository: found, or the test says why it was skipped."""

from pathlib import Path

from rotaryquant import env

REPOSITORY = Path(__file__).resolve().parents[2]


def assets_root() -> Path:
    """Folder named by RQ_ASSETS, else `shared` beside the repository; it need not exist."""
    return env.assets_dir() or REPOSITORY.parent / "shared"


def missing_asset(*names: str) -> str | None:
    """Why a test cannot have these files or folders of the assets, or None.

    names: paths relative to the assets folder, e.g. "models/tiny-moe"; without any, only the folder is looked for.
    """
    root = assets_root()
    if not root.is_dir():
        return f"no assets: {root} is not there (set RQ_ASSETS)"
    absent = [name for name in names if not (root / name).exists()]
    return f"no assets: {root} lacks {', '.join(absent)}" if absent else None


def asset(name: str) -> Path:
    """Path of one asset. Raises FileNotFoundError; tests marked `assets(name)` never get that far."""
    if reason := missing_asset(name):
        raise FileNotFoundError(reason)
    return assets_root() / name
