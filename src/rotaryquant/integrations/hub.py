"""A model on the hub as its headers describe it: config.json, the index, and the first bytes of each weight file."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import logging
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status

from rotaryquant.errors import ModelFileError
from rotaryquant.planning.checkpoint import Checkpoint, checkpoint, read_checkpoint
from rotaryquant.weights.headers import (
    INDEX_NAME,
    SINGLE_NAME,
    TensorInfo,
    header_length,
    join_shards,
    parse_header,
    read_weight_map,
)

_WAYS = "check the name, go online or log in (`hf auth login`), or give a local folder"
_LENGTH_BYTES = 8
_PARTIAL_CONTENT = 206


def hub_checkpoint(hub_id: str) -> Checkpoint:
    """The checkpoint of a hub repository; of its weight files only headers are asked for.

    One that is wholly in the hub's own cache is read from there. Raises ModelFileError where it is neither there nor
    can be reached, or its files are not whole, UnsupportedModelError for a family that is not known.
    """
    try:
        cached = Path(snapshot_download(hub_id, local_files_only=True))
        if any(cached.glob("*.safetensors")):
            return read_checkpoint(cached, hub_id)
    except (LocalEntryNotFoundError, ModelFileError, OSError):
        pass  # not here, or not all of it
    except HFValidationError as error:
        raise ModelFileError(
            f"model {hub_id!r} not found: no such folder or .gguf file, and not an org/name on the hub"
        ) from error
    before = logging.get_verbosity()
    logging.set_verbosity(40)  # errors alone, not retries, which the error sums up in one line
    try:
        config: dict[str, Any] = json.loads(Path(hf_hub_download(hub_id, "config.json")).read_bytes())
        return checkpoint(hub_id, config, _tensors(hub_id), "safetensors")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            name = "config.json" if "config.json" in str(error) else SINGLE_NAME
            raise ModelFileError(
                f"model {hub_id!r} has no {name} on the hub; name a repository that holds safetensors files"
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelFileError(f"model {hub_id!r} is not here and cannot be fetched: {reason}; {_WAYS}") from error
    finally:
        logging.set_verbosity(before)


def _tensors(hub_id: str) -> list[TensorInfo]:
    """Tensors of all weight files."""
    try:
        index = Path(hf_hub_download(hub_id, INDEX_NAME))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return _header(hub_id, SINGLE_NAME)
    weight_map = read_weight_map(index)
    return join_shards(index, weight_map, {shard: _header(hub_id, shard) for shard in sorted(set(weight_map.values()))})


def _header(hub_id: str, name: str) -> list[TensorInfo]:
    """Tensors of one file, whose header alone is read."""
    url = hf_hub_url(hub_id, name)
    prefix, size = _range(url, 0, _LENGTH_BYTES)
    length = header_length(Path(name), prefix)
    text, _ = _range(url, _LENGTH_BYTES, length)
    return parse_header(Path(name), text, size)


def _range(url: str, begin: int, count: int) -> tuple[bytes, int]:
    """`count` bytes of a file from `begin` on, and the size of the whole file.

    Raises ModelFileError where the server would send all of it instead: nothing of that is read.
    """
    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{begin + count - 1}"}
    try:
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            if response.status_code != _PARTIAL_CONTENT:
                hf_raise_for_status(response)
                raise ModelFileError(
                    f"{url}: the server sends whole files only, not the {count} bytes of a header; download the model "
                    f"and give its folder"
                )
            data = response.read()
            size = int(response.headers.get("Content-Range", "").rpartition("/")[2] or 0)
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # its name changes with versions of the hub's client
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error
    if len(data) != count:
        raise ModelFileError(f"{url}: asked for {count} bytes, got {len(data)}; try again")
    return data, size
