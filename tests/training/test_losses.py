"""The chunked loss equals the plain one, its gradient equals autodiff."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import losses, vocabulary

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, A, K, V, D, R = 3, 8, 4, 37, 6, 5


@pytest.fixture(name="problem", scope="module")
def _problem():
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def draw(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    drafts = (
        vocabulary.DraftRows(draw(B, A, K, D), draw(B, A, K, R), draw(V, R)),
        vocabulary.DraftRows(draw(B, A, K, D), None, None),
    )
    labels = jax.random.randint(next(keys), (B, A, K), 0, V)
    mask = jax.random.bernoulli(next(keys), 0.8, (B, A, K))
    weights = losses.slot_weights(mask, 4.0) / 50
    return drafts, draw(V, D), draw(B, A, K, D), labels, weights


def plain_loss(draft, head, hidden, labels, weights, parts):
    terms = vocabulary.reference_terms(draft, head, hidden, labels)
    slots = parts.ce * terms.ce + parts.l1 * terms.l1
    if parts.kl is not None:
        slots = slots + parts.kl * terms.kl
    total = jnp.sum(weights * slots)
    if parts.joint is not None:
        accept = losses.accept_rate(terms.l1) * (weights > 0).astype(jnp.float32)
        survival = [
            jnp.prod(accept[..., : k + 1], axis=-1) for k in range(accept.shape[-1])
        ]
        total = total - parts.joint * jnp.sum(jnp.stack(survival))
    return total, terms


def chunked_loss(drafts, *rest, chunk_slots):
    found, terms = vocabulary.loss(drafts, *rest, chunk_logits=chunk_slots * V)
    # Unequal cotangents: each drafter has its own.
    return found[0] + 2 * found[1], terms


def weighing(*values):
    return losses.TermWeights(*(None if v is None else jnp.float32(v) for v in values))


FEWEST_TERMS = (weighing(0.1, 0.9, None, None), weighing(0.1, 0.9, None, None))
ALL_TERMS = (weighing(0.1, 0.2, 0.3, 0.05), weighing(1.0, 0.0, None, None))


@pytest.mark.parametrize(
    ("chunk_slots", "parts"),
    [
        (1, FEWEST_TERMS),
        (1, ALL_TERMS),
        (24, FEWEST_TERMS),
        (24, (weighing(1.0, 0.0, None, None), weighing(0.0, 1.0, None, None))),
        (24, (weighing(0.1, 0.2, 0.7, None), weighing(0.0, 0.0, 1.0, None))),
        (24, (weighing(0.1, 0.2, None, 0.05), weighing(0.0, 0.0, None, 0.1))),
        (24, ALL_TERMS),
        (1000, FEWEST_TERMS),
        (1000, ALL_TERMS),
    ],
)
def test_chunks_equal_autodiff(problem, chunk_slots, parts):
    drafts, *rest, weights = problem
    # The second drafter has a decay of its own.
    both = weights, (weights > 0).astype(jnp.float32) / 70
    chunked = functools.partial(chunked_loss, chunk_slots=chunk_slots)
    (value, terms), gradient = jax.value_and_grad(chunked, has_aux=True)(
        drafts, *rest, both, parts
    )

    def plain(drafts):
        first, one = plain_loss(drafts[0], *rest, both[0], parts[0])
        second, two = plain_loss(drafts[1], *rest, both[1], parts[1])
        return first + 2 * second, (one, two)

    (expected, expected_terms), expected_gradient = jax.value_and_grad(
        plain, has_aux=True
    )(drafts)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    chex.assert_trees_all_close(gradient, expected_gradient, atol=2e-7, rtol=1e-4)
    for ours, theirs, part in zip(terms, expected_terms, parts, strict=True):
        kl = None if part.kl is None else theirs.kl
        expected = losses.SlotTerms(theirs.ce, theirs.l1, theirs.log_ratio, kl)
        chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-6)
    # Without a gradient the same numbers come out.
    again = chunked(drafts, *rest, both, parts)[0]
    chex.assert_trees_all_close(again, value, rtol=1e-6)


def test_head_and_target_get_no_gradient(problem):
    drafts, *rest = problem

    def loss(head, hidden):
        parts = (weighing(1, 1, 1, 1),) * 2
        weights = (rest[3],) * 2
        arguments = (drafts, head, hidden, rest[2], weights, parts)
        return vocabulary.loss(*arguments)[0][0]

    for gradient in jax.grad(loss, argnums=(0, 1))(*rest[:2]):
        assert not np.any(np.asarray(gradient))


def test_bfloat16_rows_give_float32_terms(problem):
    drafts, head, hidden, labels, weights = problem
    half = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    parts = weighing(0.1, 0.9, None, None)
    arguments = half(head), half(hidden), labels, (weights,) * 2, (parts,) * 2
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.float32), half((drafts, head, hidden))
    )
    expected = [
        plain_loss(draft, *rounded[1:], labels, weights, parts)[0]
        for draft in rounded[0]
    ]
    found, terms = vocabulary.loss(half(drafts), *arguments)
    chex.assert_tree_all_finite((found, terms))
    assert terms[0].l1.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_equal_distributions_have_no_distance(problem):
    _, head, hidden, labels, weights = problem
    same = vocabulary.DraftRows(hidden, None, None)
    found, (terms,) = vocabulary.loss(
        (same,), head, hidden, labels, (weights,), (weighing(0, 1, None, None),)
    )
    assert float(found[0]) == 0
    np.testing.assert_array_equal(losses.accept_rate(terms.l1), np.ones((B, A, K)))


def test_slot_weights():
    mask = jnp.asarray([[[True, True, False]]])
    np.testing.assert_allclose(
        losses.slot_weights(mask, 4.0)[0, 0], [1, np.exp(-0.25), 0], rtol=1e-6
    )
    np.testing.assert_array_equal(losses.slot_weights(mask, 0)[0, 0], [1, 1, 0])


def test_confidence_loss_is_cross_entropy_without_gradient_to_its_label():
    x, y = (
        jnp.asarray([-90.0, -0.3, 0.0, 2.0, 90.0]),
        jnp.asarray([0.0, 0.2, 1.0, 0.7, 1]),
    )
    p = 1 / (1 + np.exp(-np.float64(x)))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = -np.where(y > 0, y * np.log(p), 0)
        expected -= np.where(y < 1, (1 - y) * np.log1p(-p), 0)
    np.testing.assert_allclose(losses.confidence_loss(x, y), expected, atol=1e-6)
    label_gradient = jax.grad(lambda y: jnp.sum(losses.confidence_loss(x, y)))(y)
    np.testing.assert_array_equal(label_gradient, np.zeros(5))


def test_metrics_of_a_known_batch():
    terms = losses.SlotTerms(
        ce=jnp.ones((1, 2, 2)), l1=jnp.asarray([[[1.0, 1], [2, 0]]]), log_ratio=None
    )
    supervised = jnp.asarray([[[True, True], [False, False]]])
    weights = losses.slot_weights(supervised, 0)
    found = losses.metrics(terms, jnp.zeros((1, 2, 2)), supervised, weights)
    ratios = {name: np.asarray(top / bottom) for name, (top, bottom) in found.items()}
    np.testing.assert_allclose(ratios["accept_rate"], [0.5, 0.5])
    np.testing.assert_allclose(ratios["tau_probabilistic"], 1 + 0.5 + 0.25)
    np.testing.assert_allclose(ratios["confidence_bias"], 0, atol=1e-7)
    np.testing.assert_allclose(ratios["confidence_loss"], np.log(2), rtol=1e-6)
