"""NaN in the target ends the requests that meet it, and no other."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters import dspark

# First the words to compare with, compiled as for all other modules.
pytestmark = pytest.mark.usefixtures("asked", "quick_compilation")


@pytest.mark.parametrize("mode", ["plain", "compact"])
def test_nan_in_the_target_fails_its_request_alone(mode, make_engine, asked, models):
    """A token whose embedding is NaN: it spoils its own request, and no page after."""
    poison = 5
    spoiled = [i for i, a in enumerate(asked) if poison in (*a.prompt, *a.words[:-1])]
    clean = [i for i, a in enumerate(asked) if poison not in (*a.prompt, *a.words)]
    assert spoiled
    assert len(clean) > 3
    params = models.target_params
    embed = params.embed.at[poison].set(jnp.nan)
    # The head keeps the sound table, so that the token's own logit stays finite.
    params = params.replace(embed=embed, head=params.embed)
    # Drafted, it would spoil the pass that verifies it: the drafter leaves it out.
    ids = np.delete(np.arange(19), poison)
    drafter_params = dspark.with_draft_vocabulary(
        models.drafter_params, *models[:2], ids
    )
    broken_models = models._replace(target_params=params, drafter_params=drafter_params)
    fields = {
        "plain": {"num_pages": 5, "page_size": 8, "chunk": 3},
        "compact": {"num_pages": 9},
    }
    engine = make_engine(mode, models=broken_models, **fields[mode])
    order = np.random.default_rng(0).permutation(spoiled + clean)
    handles = {int(i): asked[i].submit(engine) for i in order}
    engine.run()
    for i in clean:
        asked[i].check(handles[i])
    for i in spoiled:
        found, words = tuple(handles[i].tokens), asked[i].words
        assert handles[i].finish_reason == "non_finite"
        if poison in asked[i].prompt:
            assert found == ()
        else:
            assert found == words[: words.index(poison) + 1]
