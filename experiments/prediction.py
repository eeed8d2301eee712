"""How fast speculative decoding should be: the theory of Leviathan et al. 2022 (arXiv 2211.17192) and Chen et al. 2023
(arXiv 2302.01318).

Terms of Leviathan et al.: gamma tokens are drafted a round; alpha is the chance that a drafted token is accepted, given
that those before it were; c is the time of one step of the drafter over one of the target. Theirs is an idealisation in
two ways: tokens are accepted independently of their place, and verifying gamma + 1 tokens takes the target as long as
one. Here it takes v(gamma) times as long, and the acceptance of each place is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass
class Round:
    """One round whose draft had its full length."""

    accepted: int
    seconds: float  # of the whole round
    draft_seconds: float  # of these, until there was a draft: the drafter and what chooses from its candidates


def acceptance_rate(accepted: Sequence[int], gamma: int) -> float:
    """alpha: tokens accepted over tokens that were looked at, i.e. whose predecessors were all accepted.

    The maximum-likelihood estimate for independent acceptances (Leviathan et al., definition 3.1 and section 3.1).
    """
    rejections = sum(count < gamma for count in accepted)
    return sum(accepted) / max(1, sum(accepted) + rejections)


def acceptance_by_place(accepted: Sequence[int], gamma: int) -> list[float]:
    """The share of rounds that accepted at least t tokens, for t = 1 .. gamma; never increasing."""
    return [sum(count >= place for count in accepted) / len(accepted) for place in range(1, gamma + 1)]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens that a round commits, (1 - alpha^(gamma + 1)) / (1 - alpha): Leviathan et al., equation 1."""
    return gamma + 1.0 if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def expected_tokens_by_place(rates: Sequence[float], gamma: int) -> float:
    """The same without independence: one token of the target's own, and each place as often as it's reached."""
    return 1.0 + sum(rates[:gamma])


def speedup(tokens: float, drafting: float, verifying: float = 1.0) -> float:
    """Over plain decoding; times are in steps of the target.

    With drafting = gamma c and verifying = 1 this is theorem 3.8 of Leviathan et al.
    """
    return tokens / (drafting + verifying)


@dataclass
class Costs:
    """Times of a round's parts in plain steps, by gamma = 1, 2, ...: the medians of measured rounds."""

    step_seconds: float  # of a plain step
    drafting: list[float]
    verifying: list[float]

    @classmethod
    def of(cls, plain: Sequence[Round], rounds: Sequence[Sequence[Round]]) -> "Costs":
        """From plain rounds and those of each gamma."""
        step = median(one.seconds for one in plain)
        drafting = [median(one.draft_seconds for one in each) / step for each in rounds]
        verifying = [median(one.seconds - one.draft_seconds for one in each) / step for each in rounds]
        return cls(step, drafting, verifying)


def predictions(costs: Costs, alpha: float, rates: Sequence[float], one_pass: bool) -> list[dict[str, float]]:
    """For each gamma three speed-ups: the papers', with the measured cost of verification, and with the acceptance of
    each place and the measured cost of drafts of that length as well.

    A step of a drafter that goes token by token costs c, the longest draft's time over its length; a drafter that runs
    once for a block always costs what its longest draft does.
    """
    most = len(costs.drafting)
    found = []
    for gamma in range(1, most + 1):
        drafting = costs.drafting[-1] if one_pass else gamma * costs.drafting[-1] / most
        tokens, by_place = expected_tokens(alpha, gamma), expected_tokens_by_place(rates, gamma)
        verifying = costs.verifying[gamma - 1]
        found.append(
            {
                "gamma": gamma,
                "drafting": costs.drafting[gamma - 1],
                "verifying": verifying,
                "tokens_iid": tokens,
                "tokens_by_place": by_place,
                "paper": speedup(tokens, drafting),
                "iid": speedup(tokens, drafting, verifying),
                "by_place": speedup(by_place, costs.drafting[gamma - 1], verifying),
            }
        )
    return found


def measured(plain: Sequence[Round], rounds: Sequence[Round]) -> dict[str, float]:
    """What came of drafting with one gamma: tokens a round, and tokens/s over plain decoding's."""
    tokens = 1.0 + sum(one.accepted for one in rounds) / len(rounds)
    seconds, step = (sum(one.seconds for one in each) / len(each) for each in (rounds, plain))
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "speedup": tokens * step / seconds}
