"""One sequence being decoded greedily, whatever holds its keys and values: what `bench decode` lets take turns."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, QuantizedCache

from rotaryquant.bench.timing import Clock
from rotaryquant.config import KVCacheConfig
from rotaryquant.errors import ConfigError
from rotaryquant.integrations.transformers.cache import PackedCache, PackedCacheLayer
from rotaryquant.integrations.transformers.enable import enabled
from rotaryquant.integrations.transformers.session import Session

#: KV types of llama.cpp and their numbers in ggml.h.
LLAMA_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}

#: Backends of transformers' QuantizedCache → the package that they need, its module, and their options.
QUANTIZED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "quanto": ("optimum-quanto", "optimum.quanto", {"nbits": 4}),
    "hqq": ("hqq", "hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "fp8": ("torch", "torch", {}),
}


class Run(Protocol):
    """A sequence that grows token by token."""

    @property
    def nbytes(self) -> int | None:
        """Bytes of its keys and values as they are held now, None where the host does not say."""

    def start(self, ids: Sequence[int]) -> None:
        """Read a prompt of at least one token."""

    def window(self, steps: int, clock: Clock) -> float:
        """Seconds that `steps` greedy tokens take, after one that is not timed."""


class ModelRun:
    """A model of transformers with a cache.

    kv: how to pack it, or None. make_cache: a cache of transformers' for the model, by default a DynamicCache. The
    model is shared with other runs, so packing is switched on for the length of each window alone.
    """

    def __init__(
        self, model: PreTrainedModel, kv: KVCacheConfig | None = None, make_cache: Callable[[], Cache] | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.make_cache = make_cache
        self._session: Session | None = None
        self._token = 0
        self._prompt_reads = 0

    @property
    def cache(self) -> Cache | None:
        """The cache, once a prompt was read."""
        return None if self._session is None else self._session.cache

    @property
    def nbytes(self) -> int | None:
        """Bytes of all tensors that the cache's layers hold, by storage."""
        return None if self.cache is None else cache_bytes(self.cache)

    @property
    def packed_reads(self) -> int:
        """Packed rows read since the prompt, 0 for caches without any."""
        return self._all_reads() - self._prompt_reads

    def _all_reads(self) -> int:
        return self.cache.counters.packed_reads if isinstance(self.cache, PackedCache) else 0

    def start(self, ids: Sequence[int]) -> None:
        """See `Run`."""
        with enabled(self.model, self.kv) if self.kv is not None else nullcontext() as state:
            self._session = Session(self.model, state)
            if self.make_cache is not None:
                self._session.cache = self.make_cache()
            logits = self._session.read(ids)
            assert logits is not None
            self._token = int(logits.argmax())
            self._prompt_reads = self._all_reads()

    def window(self, steps: int, clock: Clock) -> float:
        """See `Run`."""
        assert self._session is not None
        with enabled(self.model, self.kv) if self.kv is not None else nullcontext():
            self._token = int(self._session.step(self._token).argmax())
            start = clock.read()
            for _ in range(steps):
                self._token = int(self._session.step(self._token).argmax())
            return clock.read() - start


class LlamaRun:
    """A GGUF file through llama-cpp-python with flash attention. kv_type: a key of `LLAMA_TYPES`, for K and V.

    Raises ConfigError where llama.cpp cannot load the file.
    """

    def __init__(self, path: Path, kv_type: str, room: int, threads: int) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        kind = LLAMA_TYPES[kv_type]
        try:
            self.llama = llama_cpp.Llama(
                model_path=str(path), n_ctx=room, n_threads=threads, n_threads_batch=threads, flash_attn=True,
                type_k=kind, type_v=kind, verbose=False,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"--llama-gguf {path.name}: llama.cpp cannot load it ({error})") from error

    @property
    def nbytes(self) -> int | None:
        """See `Run`."""
        return None

    def start(self, ids: Sequence[int]) -> None:
        """See `Run`."""
        self.llama.reset()
        self.llama.eval(list(ids))

    def window(self, steps: int, clock: Clock) -> float:
        """See `Run`."""
        self._step()
        start = clock.read()
        for _ in range(steps):
            self._step()
        return clock.read() - start

    def _step(self) -> None:
        self.llama.eval([self.llama.sample(temp=0.0)])


def quantized_run(model: PreTrainedModel, backend: str) -> ModelRun | str:
    """A run with transformers' QuantizedCache on a backend of `QUANTIZED`, or the reason why there is none."""
    package, module, settings = QUANTIZED[backend]
    if missing := missing_package(package, module):
        return missing

    def make() -> Cache:
        return QuantizedCache(backend, model.config, **settings)

    try:
        make()
    except (ImportError, ValueError) as error:
        return " ".join(str(error).split())
    return ModelRun(model, make_cache=make)


def missing_package(package: str, module: str) -> str | None:
    """Why a module of a package cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # the latter two where a library does not load
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"{package} is not installed"
        return f"{package} cannot be imported: {' '.join(str(error).split())}"
    return None


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors in a cache's layers, each storage once, of whatever kind the layers are."""
    storages: dict[int, int] = {}
    total = 0
    for layer in cache.layers:
        if isinstance(layer, PackedCacheLayer):
            total += layer.packed.nbytes
            continue
        for tensor in _tensors(list(vars(layer).values())):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return total + sum(storages.values())


def _tensors(item: object) -> Iterator[Tensor]:
    """Plain tensors inside an object: in containers, and in tensors of other libraries that wrap them."""
    if isinstance(item, Tensor):
        inner = getattr(item, "__tensor_flatten__", None)
        if inner is None or type(item) is Tensor:
            yield item
        else:
            for name in inner()[0]:
                yield from _tensors(getattr(item, name))
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)
