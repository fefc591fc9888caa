"""Keeps what a measurement says while it runs."""


class Told:
    """A `measuring.Progress`. messages: in order. shares: those that came with one."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.shares: list[float] = []

    def __call__(self, message: str, share: float | None = None) -> None:
        """Keep both."""
        self.messages.append(message)
        if share is not None:
            self.shares.append(share)

    def advanced(self) -> bool:
        """Whether the shares begin at nothing and rise, never beyond all."""
        return self.shares[0] == 0 and self.shares == sorted(set(self.shares)) and self.shares[-1] <= 1
