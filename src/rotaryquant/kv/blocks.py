"""Which block holds which positions of which row: integers only.

Blocks are shared between rows that have the same history (beams, several returned sequences); a shared block
is copied before it is written.
"""

from dataclasses import dataclass, field

from rotaryquant.formats.kv import BLOCK, STRIP


def slab_blocks(first_blocks: int) -> int:
    """Blocks in each slab, the grain in which memory is taken, for a cache that starts with `first_blocks`.

    A quarter of what is stored first bounds the slack; at least 2 and at most 32 blocks (256 to 4,096 positions)
    bound the number of slabs and a short cache's waste.
    """
    return max(2, min(32, first_blocks // 4))


@dataclass
class Row:
    """One sequence of a batch.

    pad: columns of left padding before its first token. packed_len: positions [0, packed_len) are packed.
    blocks: block ids, entry i for positions [128i, 128i + 128).
    """

    pad: int = 0
    packed_len: int = 0
    blocks: list[int] = field(default_factory=list)


class BlockPool:
    """Hands out block ids and counts who uses each."""

    def __init__(self) -> None:
        self.num_blocks = 0  # ids ever handed out: the storage must hold that many
        self._free: list[int] = []
        self._users: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Blocks that at least one row uses."""
        return len(self._users)

    def allocate(self) -> int:
        """A block with one user; the lowest free id, so that storage stays dense."""
        if self._free:
            self._free.sort(reverse=True)
            block = self._free.pop()
        else:
            block = self.num_blocks
            self.num_blocks += 1
        self._users[block] = 1
        return block

    def is_shared(self, block: int) -> bool:
        """Whether more than one row uses the block."""
        return self._users[block] > 1

    def release(self, block: int) -> None:
        """Drop one user; a block without users is free."""
        self._users[block] -= 1
        if self._users[block] == 0:
            del self._users[block]
            self._free.append(block)

    def fork(self, row: Row) -> Row:
        """A second row with the same history."""
        for block in row.blocks:
            self._users[block] += 1
        return Row(row.pad, row.packed_len, list(row.blocks))

    def release_row(self, row: Row) -> None:
        """Drop everything a row holds."""
        for block in row.blocks:
            self.release(block)
        row.blocks.clear()
        row.packed_len = 0

    def writable(self, row: Row, end: int) -> list[tuple[int, int]]:
        """Give `row` blocks for positions [packed_len, end) that nobody else reads.

        Returns (source, copy) pairs: the caller copies the bytes of each source block before writing.
        """
        copies: list[tuple[int, int]] = []
        last = row.packed_len // BLOCK
        if row.packed_len % BLOCK and end > row.packed_len and self.is_shared(row.blocks[last]):
            copies.append(self.replace(row, last))
        while len(row.blocks) * BLOCK < end:
            row.blocks.append(self.allocate())
        return copies

    def replace(self, row: Row, index: int) -> tuple[int, int]:
        """Give `row` a block of its own at `index`; returns (old block, new block)."""
        old, new = row.blocks[index], self.allocate()
        row.blocks[index] = new
        self.release(old)
        return old, new

    def truncate(self, row: Row, packed_len: int) -> bool:
        """Forget packed positions from `packed_len` on and free their blocks.

        Returns whether the strip that is now partly filled was full, so that the caller must reopen it.
        """
        if packed_len >= row.packed_len:
            return False
        keep = -(-packed_len // BLOCK)
        for block in row.blocks[keep:]:
            self.release(block)
        was_full = packed_len % STRIP > 0 and row.packed_len >= -(-packed_len // STRIP) * STRIP
        del row.blocks[keep:]
        row.packed_len = packed_len
        return was_full
