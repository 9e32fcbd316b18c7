"""Texts from nothing: what is kept, both files, budgets, interruption, going on."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from dspark_jax.training.texts import corpus, corpus_files, records, synthesis
from dspark_jax.training.texts.data import Rows

CONFIG = synthesis.SynthesisConfig(
    length=96,
    batch_rows=6,
    max_prefix=40,
    max_user=8,
    temperatures=(1.0,),
    shares=(1.0,),
    min_loss_tokens=4,
)


def draw(rng, count):
    return [("own", f"Say {rng.integers(100)}.") for _ in range(count)]


def write(chat_target, folder, config=CONFIG, **options):
    return synthesis.synthesize(
        folder,
        chat_target.target,
        chat_target.params,
        chat_target.tokenizer,
        config,
        **{"draw": draw, **options},
    )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_both_files_say_the_same(chat_target, tmp_path):
    seen = []
    counts = write(chat_target, tmp_path, seconds=1e-9, log=seen.append)
    assert len(seen) == counts.num_batches == 1
    assert counts.num_written == 6
    target = chat_target.target.config
    loaded = corpus_files.load_corpus(
        tmp_path, vocab_size=target.vocab_size, fingerprint=target.fingerprint
    )
    assert loaded.seed == CONFIG.seed
    assert loaded.counts == dataclasses.asdict(counts) | {
        "settings": json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    }
    (bucket,) = loaded.buckets
    rows = bucket.take(slice(None))
    assert (bucket.length, bucket.num_rows) == (96, counts.num_rows)
    assert int(rows.loss_mask.sum()) == counts.num_supervised > 0
    chats = list(records.read(tmp_path / synthesis.CONVERSATIONS))
    assert len(chats) == counts.num_rows == sum(counts.domains.values())
    for chat, tokens, mask in zip(chats, rows.tokens, rows.loss_mask, strict=True):
        first = next(m["content"] for m in chat.messages if m["role"] == "assistant")
        begin = int(np.argmax(mask))
        end = begin + int(np.argmin(np.append(mask[begin:], False)))
        text = chat_target.tokenizer.decode(tokens[begin:end])
        assert first == text
    control = set(chat_target.tokenizer.control_tokens)
    end = corpus.chat_tokens(chat_target.tokenizer).end_of_turn
    written = set(rows.tokens[rows.loss_mask].tolist())
    assert not written & (control - {end})


def test_an_interrupted_run_goes_on(chat_target, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    three = itertools.cycle([False, False, True])
    write(chat_target, whole, should_stop=lambda: next(three))
    for number in range(3):
        counts = write(chat_target, parts, should_stop=lambda: True, resume=True)
        assert counts.num_batches == number + 1
        corpus_files.load_corpus(parts)
        with (parts / synthesis.CONVERSATIONS).open("ab") as file:
            file.write(b'{"half')  # of a batch that was not committed
    with (parts / synthesis.CONVERSATIONS).open("rb+") as file:
        file.truncate((whole / synthesis.CONVERSATIONS).stat().st_size)
    assert files(parts) == files(whole)
    with pytest.raises(FileExistsError, match="give another folder"):
        write(chat_target, whole)
    other = dataclasses.replace(CONFIG, length=100)
    with pytest.raises(ValueError, match="made with length 96, not 100"):
        write(chat_target, whole, other, resume=True)


def test_the_token_budget_counts_answers(chat_target, tmp_path):
    counts = write(chat_target, tmp_path, num_tokens=500)
    assert counts.num_supervised >= 500
    again = write(chat_target, tmp_path, num_tokens=500, resume=True)
    assert again == counts  # nothing is left to do


def rows_of(*texts):
    """Prompt [5, n], then the answer, as rows of 40 tokens."""
    tokens = np.zeros((len(texts), 40), np.int32)
    mask = np.zeros((len(texts), 40), np.bool_)
    for row, (prompt, answer) in enumerate(texts):
        tokens[row, :2] = 5, prompt
        tokens[row, 2 : 2 + len(answer)] = answer
        mask[row, 2 : 2 + len(answer)] = True
    return Rows(tokens=tokens, loss_mask=mask)


def test_the_sieve_names_its_reasons():
    config = synthesis.SynthesisConfig(max_repeated=0.5, same_prompt=2)
    sieve = synthesis.Sieve(config, end_of_turn=2)
    good = list(range(10, 30))
    found = sieve.reasons(
        rows_of(
            (1, good),
            (1, good),
            (1, good[::-1]),
            (1, good[5:]),
            (3, good[:13]),
            (3, [2, *good]),
            (3, [7] * 30),
            (3, []),
        )
    )
    assert found == [
        "",
        "same_conversation",
        "",
        "same_prompt",
        "too_few",
        "empty_answer",
        "repeated",
        "too_few",
    ]
    later = synthesis.Sieve(config, end_of_turn=2)
    later.note(rows_of((1, good), (1, good[::-1])))
    assert later.reasons(rows_of((1, good), (1, good[5:]), (4, good))) == [
        "same_conversation",
        "same_prompt",
        "",
    ]


def test_the_report_counts_drops():
    counts = synthesis.Counts(
        num_written=9, num_rows=7, dropped_repeated=2, domains={"maths": 4, "bare": 3}
    )
    report = counts.report()
    assert "7 kept (3 bare, 4 maths)" in report
    assert "2 rows dropped: 0 too few, 0 empty answer, 2 repeated" in report


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_rows": 0}, "batch_rows must be at least 1, got 0"),
        ({"same_prompt": 0}, "same_prompt must be at least 1, got 0"),
        ({"max_repeated": 1.5}, r"max_repeated must lie in \[0, 1\], got 1\.5"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        synthesis.SynthesisConfig(**fields)


def test_rows_must_fit(chat_target, tmp_path):
    last = chat_target.target.config.max_position
    for length in (40, last + 1):
        config = dataclasses.replace(CONFIG, length=length)
        with pytest.raises(ValueError, match=rf"length must lie in \d+\.\.{last} \("):
            write(chat_target, tmp_path / str(length), config)
