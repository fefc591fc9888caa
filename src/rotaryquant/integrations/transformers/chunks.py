"""Forwards of many tokens that see what they would see one by one."""

from collections.abc import Iterator

from rotaryquant.config import KVCacheConfig
from rotaryquant.formats.kv import BLOCK
from rotaryquant.kv.tail import packed_end


def still_chunks(begin: int, end: int, kv: KVCacheConfig | None, step: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Ranges that cover [begin, end), at most `step` long.

    With a tail, the queries of a range see the same packed rows: none is packed between two of them.
    """
    while begin < end:
        stop = min(end, begin + step)
        if kv is not None and kv.tail:
            packed = packed_end(kv, begin, fresh=True)
            stop = next((at for at in range(begin + 1, stop) if packed_end(kv, at, fresh=True) != packed), stop)
        yield begin, stop
        begin = stop
