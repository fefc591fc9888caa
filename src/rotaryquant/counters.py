"""What attention really read: proof that a result came from packed rows."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Sums over layers and query positions of the key rows that were visible, by where they lay.

    packed_reads: rows read as codes. dense_reads: exact rows read (tail, sinks, prompt chunks).
    packed_calls, dense_calls: attention calls that read any packed row, and those that read none.
    """

    packed_reads: int = 0
    dense_reads: int = 0
    packed_calls: int = 0
    dense_calls: int = 0

    def add(self, other: "Counters") -> None:
        """Add another count to this one."""
        self.packed_reads += other.packed_reads
        self.dense_reads += other.dense_reads
        self.packed_calls += other.packed_calls
        self.dense_calls += other.dense_calls

    def since(self, earlier: "Counters") -> "Counters":
        """What was counted after `earlier` was taken."""
        return Counters(
            self.packed_reads - earlier.packed_reads,
            self.dense_reads - earlier.dense_reads,
            self.packed_calls - earlier.packed_calls,
            self.dense_calls - earlier.dense_calls,
        )

    def as_dict(self) -> dict[str, int]:
        """Plain data for reports."""
        return asdict(self)


def visible_pairs(rows: int, seq_len: int, begin: int, end: int, window: int = 0) -> int:
    """Pairs (query, key) with the newest `rows` of `seq_len` positions as queries, keys at [begin, end), causal.

    window: if > 0, a query sees only its last `window` positions.
    """
    if rows == 1 and seq_len > 0:  # a step: no loops
        return max(0, min(end, seq_len) - max(begin, seq_len - window if window > 0 else 0))
    total = 0
    first = max(0, seq_len - rows)
    if window == 0:
        # queries at or after the last key see all of them; earlier ones see a triangle
        full = max(0, seq_len - max(first, end - 1)) if end > begin else 0
        low, high = max(first, begin), min(seq_len, end - 1)
        triangle = sum(range(low - begin + 1, high - begin + 1)) if high > low else 0
        return full * max(0, end - begin) + triangle
    for position in range(first, seq_len):
        total += max(0, min(end, position + 1) - max(begin, position + 1 - window))
    return total
