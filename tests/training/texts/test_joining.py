"""Several corpora become one: nothing lost, nothing twice."""

import numpy as np
import pytest

from dspark_jax.training.texts import corpus_files, corpus_writer, joining
from dspark_jax.training.texts.data import Rows


def save(folder, *buckets, vocab_size=100, fingerprint="abc"):
    corpus_writer.save_corpus(
        folder,
        [Rows(tokens=tokens, loss_mask=tokens > 50) for tokens in buckets],
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        counts={"of": folder.name},
    )
    return folder


def rows(*values, length=10):
    return np.tile(np.asarray(values, np.int32)[:, None], (1, length))


def test_rows_are_copied_once(tmp_path):
    a = save(tmp_path / "a", rows(1, 60, 2), rows(70, length=6))
    b = save(tmp_path / "b", rows(61, 2))
    seen = []
    counts = joining.join(
        tmp_path / "c", [a, b], log=lambda counts: seen.append(counts.num_rows)
    )
    corpus = corpus_files.load_corpus(tmp_path / "c", fingerprint="abc")
    found = {
        bucket.length: bucket.take(slice(None)).tokens[:, 0].tolist()
        for bucket in corpus.buckets
    }
    assert found == {6: [70], 10: [1, 60, 2, 61]}
    masks = corpus.buckets[1].take(slice(None)).loss_mask
    assert masks.all(axis=1).tolist() == [False, True, False, True]
    assert not masks[[0, 2]].any()
    assert (counts.num_rows, counts.num_tokens, counts.num_supervised) == (5, 46, 26)
    assert counts.dropped_same_conversation == 1
    assert corpus.counts["sources"] == [{"of": "a"}, {"of": "b"}]
    assert seen == [1, 4, 5]
    assert counts.report().startswith("5 rows of 2 corpora, 46 tokens, 26 of answers")


def test_what_does_not_fit_together_is_refused(tmp_path):
    a, b = save(tmp_path / "a", rows(1)), save(tmp_path / "b", rows(2))
    other = save(tmp_path / "other", rows(3), fingerprint="xyz")
    wider = save(tmp_path / "wider", rows(3), vocab_size=200)
    with pytest.raises(ValueError, match="must name two corpora or more, got 1"):
        joining.join(tmp_path / "c", [a])
    with pytest.raises(ValueError, match="another target: fingerprint xyz"):
        joining.join(tmp_path / "c", [a, other])
    with pytest.raises(ValueError, match="a vocabulary of 200 tokens, the target has"):
        joining.join(tmp_path / "c", [a, wider])
    with pytest.raises(FileNotFoundError, match="is not a corpus folder"):
        joining.join(tmp_path / "c", [a, tmp_path / "none"])
    with pytest.raises(FileExistsError, match="is there already"):
        joining.join(a, [a, b])
    assert not (tmp_path / "c").exists()


def test_a_corpus_of_an_unknown_target_does_not_hide_that_others_differ(tmp_path):
    unknown = save(tmp_path / "a", rows(1), fingerprint="")
    b, c = save(tmp_path / "b", rows(2)), save(tmp_path / "c", rows(3))
    other = save(tmp_path / "d", rows(4), fingerprint="xyz")
    for sources in ([unknown, b, other], [b, unknown, other], [unknown, other, b]):
        with pytest.raises(ValueError, match="made for another target: fingerprint"):
            joining.join(tmp_path / "out", sources)
    joining.join(tmp_path / "out", [unknown, b, c])
    assert corpus_files.load_corpus(tmp_path / "out").target_fingerprint == "abc"
