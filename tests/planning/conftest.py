"""What the planner's tests share: a small model of routed experts on disk."""

from pathlib import Path

import pytest

from support.zoo import build


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe of the zoo, saved as it is."""
    folder = tmp_path_factory.mktemp("models") / "tiny-moe"
    build("qwen3_moe").save_pretrained(folder)
    return folder
