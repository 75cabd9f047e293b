"""How long something may take, judged by how long it took: a deadline that fits a laptop and a thousand ranks."""

from dataclasses import dataclass, field

FACTOR = 20
LEAST_SECONDS = 20.0


@dataclass
class Pace:
    """Deadline of something that is done again and again."""

    most: float
    """Seconds: the deadline before anything was measured, and the longest one."""
    longest: float = field(default=0.0, init=False)
    """Seconds, the longest seen."""

    @property
    def limit(self) -> float:
        """FACTOR times the longest so far, within [LEAST_SECONDS, most]."""
        return min(self.most, max(LEAST_SECONDS, FACTOR * self.longest)) if self.longest else self.most

    def took(self, seconds: float) -> None:
        """Note a duration."""
        self.longest = max(self.longest, seconds)
