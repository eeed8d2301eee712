"""Counts the joint laws that enumeration compares, and prints how far they were apart at most."""

import pytest
from torch import Tensor

differences: list[float] = []


@pytest.fixture
def same_law():
    """Asserts that a law [V, ..., V] of committed texts, summed over all outcomes in float64, is the target's."""

    def compare(found: Tensor, expected: Tensor) -> None:
        differences.append((found - expected).abs().max().item())
        assert differences[-1] < 1e-12

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if differences:
        terminalreporter.write_line(
            f"joint laws by enumeration: {len(differences)} compared, largest difference {max(differences):.1e}"
        )
