"""A mistake that is certain."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake that is certain.

    Attributes:
        code: The code, such as `L-unpaired`; `docs/doctor.md` describes each.
        where: The variable, layer, optimizer, metric or array, by path.
        seen: What was seen, with numbers.
        why: Why it is a mistake.
        fix: The usual fix.
        line: The line of the user's code, as `file.py:12`; empty if unknown.

    Example:
        >>> texts = ("shapes (8, 1) and (8,)", "rows are not paired", "add an axis to the labels")
        >>> print(Finding("L-unpaired", "loss", *texts).lines()[0])
        error   L-unpaired  loss
    """

    code: str
    where: str
    seen: str
    why: str
    fix: str
    line: str = ""

    def lines(self) -> list[str]:
        """Return the finding as lines of text."""
        place = f" ({self.line})" if self.line else ""
        return [
            f"{'error':<8}{self.code}  {self.where}{place}",
            f"{'':<8}seen: {self.seen}",
            f"{'':<8}why:  {self.why}",
            f"{'':<8}fix:  {self.fix}",
        ]
