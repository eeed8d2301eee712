"""Sampling parameters, the distribution they give, and the counter-based noise and its races."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from verifier import sampling
from verifier.errors import DcocoError, ParameterError
from verifier.sampling import (
    SamplingBatch,
    SamplingParams,
    Stream,
    draw,
    exponential_noise,
    probabilities,
    uniform_noise,
)


def batch_of(*params: SamplingParams) -> SamplingBatch:
    return SamplingBatch.stack(params, range(len(params)))


# --- parameters ---


def test_defaults_and_normalised_fields():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (256, 0.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (None, (), (), False)
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[2, 0]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[2, 0]).stop_token_ids == (2, 0)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-(2**63)).seed == -(2**63)
    numpy_values = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int32(7))
    assert type(numpy_values.max_tokens) is int and type(numpy_values.temperature) is float
    assert dataclasses.replace(params, temperature=1).temperature == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.5, True, "8", None]),
        ("temperature", [-0.1, math.nan, math.inf, True, "1", None, 10**400]),
        ("top_p", [0, 0.0, -0.5, 1.01, math.nan, True, None]),
        ("top_k", [-2, 1.0, True, 2**31]),
        ("min_p", [-0.1, 1.1, math.nan, False]),
        ("seed", [1.0, True, 2**63, "x"]),
        ("stop", ["", [""], [1], b"x", 3, {"a": 1}]),
        ("stop_token_ids", [[-1], [1.0], [True], "12", 5]),
        ("ignore_eos", [1, None, "no"]),
    ],
)
def test_wrong_values_are_named(field, values):
    for value in values:
        with pytest.raises(ParameterError, match=field) as error:
            SamplingParams(**{field: value})
        assert isinstance(error.value, DcocoError) and isinstance(error.value, ValueError)


def test_batch_flags_and_select():
    greedy = SamplingParams(top_k=5, top_p=0.5, min_p=0.1)
    plain, filtered = SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_k=3)
    batch = batch_of(greedy, plain, filtered)
    assert (batch.all_greedy, batch.any_greedy, batch.any_filter) == (False, True, True)
    assert batch.temperature.tolist() == [0.0, 1.0, 0.5] and batch.temperature.dtype == torch.float32
    assert batch.top_k.tolist() == [0, 0, 3] and batch.top_p.tolist() == [1, 1, 1]
    first = batch.select([0])
    assert (first.all_greedy, first.any_greedy, first.any_filter) == (True, True, False)
    swapped = batch.select(torch.tensor([1, 0]))
    assert swapped.seed.tolist() == [1, 0] and not swapped.any_filter and not swapped.all_greedy
    assert batch_of(SamplingParams(temperature=9e-6)).all_greedy  # vLLM's threshold
    assert not batch_of(SamplingParams(temperature=1e-5)).all_greedy


# --- probabilities ---


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One position in float64, step by step in vLLM's order, with a stable sort."""
    p = np.zeros_like(logits)
    if params.temperature == 0:
        p[np.argmax(logits)] = 1
        return p
    # The parameters are stored in float32.
    z = (logits - logits.max()) / float(np.float32(params.temperature))
    z[np.exp(z) < float(np.float32(params.min_p))] = -np.inf
    order = np.argsort(-z, kind="stable")
    kept = order[: params.top_k or len(z)]
    mass = np.exp(z[kept]) / np.exp(z[kept]).sum()
    if params.top_p < 1:
        before = np.concatenate([[0], np.cumsum(mass)[:-1]])
        kept = kept[before < float(np.float32(params.top_p))]
    p[kept] = np.exp(z[kept]) / np.exp(z[kept]).sum()
    return p


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=0.7, top_k=300),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.01),
    SamplingParams(temperature=1.0, top_p=0.9999),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=5000, top_p=0.5),
    SamplingParams(temperature=0.9, top_k=10**6, top_p=0.95),
]


@pytest.mark.parametrize(("vocab", "spread"), [(7, 2.0), (1000, 3.0), (6000, 3.0), (6000, 0.1)])
def test_probabilities_follow_the_reference(vocab, spread):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(FILTERS), 2, vocab, generator=generator, dtype=torch.float64) * spread
    logits[..., -2:] = -math.inf
    p = probabilities(logits, batch_of(*FILTERS))
    assert p.dtype == torch.float64
    expected = [
        [reference(position, params) for position in row] for params, row in zip(FILTERS, logits.numpy(), strict=True)
    ]
    np.testing.assert_allclose(p.numpy(), expected, atol=1e-13)
    p = probabilities(logits.float(), batch_of(*FILTERS))
    assert p.dtype == torch.float32
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)


def test_ties_go_to_the_lowest_ids():
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 2.0]).expand(1, 1, 6)
    kept = [probabilities(logits, batch_of(SamplingParams(temperature=1.0, top_k=k)))[0, 0] > 0 for k in (1, 3, 5)]
    assert [k.nonzero().flatten().tolist() for k in kept] == [[1], [1, 2, 4], [0, 1, 2, 4, 5]]
    even = torch.zeros(1, 1, 8)
    kept = probabilities(even, batch_of(SamplingParams(temperature=1.0, top_p=0.5)))[0, 0]
    assert kept.tolist() == [0.25] * 4 + [0.0] * 4  # 4 tokens reach exactly 0.5
    assert probabilities(even, batch_of(SamplingParams()))[0, 0].tolist() == [1.0] + [0.0] * 7


def test_min_p_comes_before_top_p():
    # After min-p two tokens share the mass 0.5 : 0.3, so the first alone reaches 0.6; before it, it wouldn't.
    logits = torch.tensor([[[0.5, 0.3, 0.1, 0.1]]]).log()
    assert probabilities(logits, batch_of(SamplingParams(temperature=1.0, min_p=0.3, top_p=0.6))).tolist() == [
        [[1.0, 0.0, 0.0, 0.0]]
    ]


def test_a_row_is_the_same_alone_and_in_a_batch():
    logits = torch.randn(len(FILTERS), 3, 6000, generator=torch.Generator().manual_seed(1)) * 0.5
    batch = batch_of(*FILTERS)
    together = probabilities(logits, batch)
    positions = torch.arange(3).expand(len(FILTERS), 3)
    tokens = draw(together, batch, positions)
    for r in range(len(FILTERS)):
        alone = probabilities(logits[r : r + 1], batch.select([r]))
        assert torch.equal(alone[0], together[r])
        assert torch.equal(draw(alone, batch.select([r]), positions[:1])[0], tokens[r])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extremes_give_no_nan(dtype):
    params = [
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e-5, top_p=1e-9),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=3e38, top_k=100, min_p=1.0),
        SamplingParams(temperature=1.0, min_p=1e-60, top_p=1e-60),
        SamplingParams(),
    ]
    logits = torch.tensor([3e4, -3e4, 2.0, -math.inf, -math.inf], dtype=dtype).repeat(len(params), 2, 1)
    logits[:, 1] = torch.tensor([-math.inf, -math.inf, -5.0, -math.inf, -math.inf], dtype=dtype)  # only one is possible
    batch = batch_of(*params)
    p = probabilities(logits, batch)
    assert p.isfinite().all() and (p[..., 3:] == 0).all()
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
    assert p[:3, 0, 0].tolist() == [1, 1, 1] and (p[:, 1, 2] == 1).all()
    tokens = draw(p, batch, torch.arange(2).expand(len(params), 2))
    assert (p.gather(-1, tokens.unsqueeze(-1)) > 0).all()


# --- noise ---


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_splitmix64_matches_plain_integers():
    def plain(x: int) -> int:
        mask = 2**64 - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    values = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    assert [v % 2**64 for v in sampling._splitmix64(int64(*values)).tolist()] == [plain(v % 2**64) for v in values]


def test_noise_is_pinned():
    """A seed means the same text in every release: these values may never change."""
    noise = exponential_noise(int64(0, 42), int64(0, 7).expand(2, 2), Stream.TARGET, int64(0, 1, 49151))
    expected = [
        [[0.07648595422, 0.01165990531, 0.85432386398], [1.08478963375, 1.71209669113, 0.43870905042]],
        [[0.73205941916, 3.51988339424, 0.76479572058], [0.49835559726, 0.11391259730, 0.23229904473]],
    ]
    np.testing.assert_allclose(noise, expected, rtol=1e-6)
    uniform = uniform_noise(int64(42), int64(7).view(1, 1), Stream.ACCEPT)
    np.testing.assert_allclose(uniform, [[0.2264872791470719]], rtol=1e-15)


def samples() -> dict[str, torch.Tensor]:
    """A hundred thousand variates along each of the axes that the noise depends on."""
    n = 100_000
    line, one = torch.arange(n), int64(3)
    return {
        "ids": exponential_noise(one, one.view(1, 1), Stream.TARGET, line).flatten(),
        "positions": exponential_noise(one, line.view(1, n), Stream.TARGET, one).flatten(),
        "seeds": exponential_noise(line, one.view(1, 1).expand(n, 1), Stream.TARGET, one).flatten(),
        "large seeds": exponential_noise(line << 40, one.view(1, 1).expand(n, 1), Stream.TARGET, one).flatten(),
        "streams": torch.stack(
            [exponential_noise(line[: n // 4], one.view(1, 1).expand(n // 4, 1), s, one).flatten() for s in Stream], 1
        ).flatten(),
        "uniform": -torch.log1p(-uniform_noise(one, line.view(1, n), Stream.ACCEPT)).flatten(),
    }


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds", "large seeds", "streams", "uniform"])
def test_noise_is_exponential_and_independent_of_its_neighbour(axis):
    e = samples()[axis].double().numpy()
    assert (e > 0).all() and np.isfinite(e).all()
    n = len(e)
    assert abs(e.mean() - 1) < 4 / math.sqrt(n)
    assert abs(e.var() - 1) < 4 * math.sqrt(8 / n)  # the variance of (E - 1)^2 is 8
    assert stats.kstest(e, "expon").pvalue > 1e-3
    # Neighbours along the axis: uniforms of adjacent variates fill the unit square evenly.
    u = np.exp(-e)
    for lag in (1, 2, 256):
        counts = np.histogram2d(u[:-lag], u[lag:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(counts.ravel()).pvalue > 1e-4
        assert abs(stats.spearmanr(e[:-lag], e[lag:]).statistic) < 4 / math.sqrt(n)


def test_positions_do_not_permute_one_another():
    noise = exponential_noise(int64(1), torch.arange(4).view(1, 4), Stream.TARGET, torch.arange(49152))[0]
    for a in range(4):
        for b in range(a):
            # About a hundred of float32's values coincide by chance.
            assert np.intersect1d(noise[a], noise[b]).size < 250
            assert abs(np.corrcoef(noise[a], noise[b])[0, 1]) < 4 / math.sqrt(49152)


def test_the_small_variates_are_right():
    """They decide which rare token wins a race."""
    e = exponential_noise(
        torch.arange(64), torch.arange(2).expand(64, 2), Stream.TARGET, torch.arange(30_000)
    ).flatten()
    for bound in (1e-2, 1e-4, 1e-5):
        expected = e.numel() * -math.expm1(-bound)
        assert abs(int((e < bound).sum()) - expected) < 4 * math.sqrt(expected)
    ends = sampling._exponential(torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32))
    np.testing.assert_allclose(ends, [2.0**-32, 3 * 2.0**-32, 24 * math.log(2)], rtol=1e-6)


def test_a_candidate_has_the_noise_of_its_id():
    seeds, positions = int64(5, -9), int64(0, 10**6, 2**40).expand(2, 3)
    everything = exponential_noise(seeds, positions, Stream.TARGET, torch.arange(1000))
    candidates = torch.randint(0, 1000, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    assert everything.shape == (2, 3, 1000) and everything.dtype == torch.float32
    torch.testing.assert_close(
        exponential_noise(seeds, positions, Stream.TARGET, candidates),
        everything.gather(-1, candidates),
        rtol=1e-6,
        atol=0,
    )
    transposed = positions.t().contiguous().t()  # any memory layout of the positions will do
    assert torch.equal(exponential_noise(seeds, transposed, Stream.TARGET, torch.arange(1000)), everything)


# --- races ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_follows_p(dtype):
    n = 50_000
    p = torch.tensor([0.5, 0.0, 0.3, 0.199, 0.001], dtype=dtype)
    batch = SamplingBatch.stack([SamplingParams(temperature=1.0)] * n, range(n))
    weights = (3 * p).expand(n, 1, 5)  # needs no normalisation
    y = draw(weights, batch, torch.zeros(n, 1, dtype=torch.int64))
    assert y.shape == (n, 1) and y.dtype == torch.int64
    counts = torch.bincount(y.flatten(), minlength=5).numpy()
    assert counts[1] == 0
    kept = p.numpy() > 0
    expected = n * p.double().numpy()[kept]
    assert stats.power_divergence(counts[kept], expected * n / expected.sum(), lambda_="log-likelihood").pvalue > 1e-3


def test_draw_of_greedy_rows_is_the_argmax():
    logits = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(2))
    logits[0, 0, [7, 9]] = 10.0
    positions = torch.arange(4).expand(2, 4)
    mixed = batch_of(SamplingParams(), SamplingParams(temperature=1.0))
    for batch, rows in ((mixed, [0]), (mixed.select([0, 0]), [0, 1])):
        y = draw(probabilities(logits, batch), batch, positions)
        assert torch.equal(y[rows], logits[rows].argmax(-1)) and y[0, 0] == 7


def test_racing_the_same_noise_couples_drafter_and_target():
    n = 20_000
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.3, 0.4, 0.1, 0.2])
    batch = SamplingBatch.stack([SamplingParams(temperature=1.0)] * n, range(n))
    positions = torch.full((n, 1), 17)
    y = draw(p.expand(n, 1, 4), batch, positions)
    ids = int64(3, 1, 0, 2).expand(n, 1, 4)  # the drafter's candidates, in its own order
    race = (q[ids] / exponential_noise(batch.seed, positions, Stream.TARGET, ids)).argmax(-1, keepdim=True)
    coupled = (ids.gather(-1, race).squeeze(-1) == y).float().mean()
    independent = (draw(q.expand(n, 1, 4), batch, positions, Stream.WALK) == y).float().mean()
    assert abs(independent - (p * q).sum()) < 0.015
    assert coupled > 0.7  # an optimal coupling has 0.8
