"""Configuration and tensor headers of a model: of a folder as they lie there, of a hub id by requests for parts of
files, so that of 60 GB of weights some hundred KB are read.
"""

import json
from pathlib import Path
from typing import Any

from rotaryquant.errors import ConfigError, ModelFileError
from rotaryquant.integrations.sources import find_source
from rotaryquant.weights.headers import DTYPE_BITS, TensorInfo, read_folder, refuse_pointer


def model_headers(model: str) -> tuple[dict[str, Any], list[TensorInfo]]:
    """What config.json of MODEL holds, and the tensors of its files.

    model: a folder or a hub id. Raises ConfigError for a GGUF file, ModelFileError where files are absent or damaged
    or the hub cannot be asked.
    """
    source = find_source(model)
    if isinstance(source, str):
        return _of_hub(source)
    if source.is_file():
        raise ConfigError(
            f"{source}: plan reads config.json and safetensors headers; use `rotaryquant inspect` for GGUF"
        )
    return read_json(source / "config.json"), read_folder(source)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ModelFileError for anything else."""
    refuse_pointer(path)
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(data, dict):
        raise ModelFileError(f"{path}: not a JSON object; fetch the file again")
    return data


def _of_hub(hub_id: str) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Of a snapshot that is here already, or else of the hub."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        return read_json(folder / "config.json"), read_folder(folder)
    except (HfHubHTTPError, HFValidationError, OSError, ModelFileError):
        pass  # not here, or not whole: configuration and headers are enough
    disable_progress_bars()
    try:
        config = read_json(Path(hf_hub_download(hub_id, "config.json")))
        files = HfApi().get_safetensors_metadata(hub_id).files_metadata
    # one way out for everything between here and a far server: no connection, no such name, no such file, no permit
    except Exception as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(
            f"model {hub_id!r} is not here and its headers cannot be read from the hub: {_first_line(error)}; check "
            f"the name, go online or log in (`hf auth login`), or give a local folder"
        ) from error
    return config, [
        _tensor(name, one.dtype, one.shape, one.data_offsets, file)
        for file, metadata in files.items()
        for name, one in metadata.tensors.items()
    ]


def _tensor(name: str, dtype: str, shape: list[int], offsets: tuple[int, int], file: str) -> TensorInfo:
    if dtype not in DTYPE_BITS:
        raise ModelFileError(f"{file}: tensor {name} has dtype {dtype!r}, which no reader knows")
    return TensorInfo(name, dtype, tuple(shape), offsets[1] - offsets[0], Path(file))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__
