"""DeepSpec's loss-mask rule: its golden cases, its quadratic form, and the counts."""

import dataclasses
import json
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import dspark_jax
from dspark_jax.targets import fetch
from dspark_jax.training.texts import (
    conversations,
    corpus_files,
    corpus_writer,
    records,
)

CASES = (
    "single_turn",
    "two_turns",
    "own_system",
    "truncated_in_answer",
    "truncated_before_answer",
    "header_in_content",
    "unfinished",
    "unicode",
)


@pytest.fixture(scope="module")
def tokenizer(golden):
    return dspark_jax.load_tokenizer(golden / "chat" / "tokenizer")


@pytest.fixture(scope="module")
def smollm2():
    if not (fetch.cache_dir() / fetch.FILE_NAME).is_file():
        pytest.skip("the default target is not in the cache")
    return dspark_jax.load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def golden_cases(golden):
    return json.loads((golden / "chat" / "chat_cases.json").read_text())


def test_no_golden_case_is_left_out(golden_cases):
    assert tuple(case["name"] for case in golden_cases["train_records"]) == CASES
    template = golden_cases["template"]
    assert template["assistant_header"] == conversations.HEADER
    assert template["end_of_turn_token"] == conversations.END
    assert template["system_prompt"] == conversations.TEMPLATES["qwen"]


@pytest.mark.parametrize("name", CASES)
def test_golden_cases(tokenizer, golden_cases, name):
    (case,) = (c for c in golden_cases["train_records"] if c["name"] == name)
    ids, mask, is_truncated = conversations.tokenize(
        tokenizer,
        case["conversations"],
        max_length=case["max_length"],
        template="qwen",
    )
    assert ids.dtype == np.int32
    assert ids.tolist() == case["input_ids"]
    assert mask.astype(int).tolist() == case["loss_mask"]
    assert int(mask.sum()) == case["num_loss_tokens"]
    marked = tokenizer.decode(ids[mask], skip_special_tokens=False)
    assert marked == case["masked_text"]
    assert is_truncated == name.startswith("truncated")


def quadratic(tokenizer, messages, max_length, template):
    """The rule as it is written down: every prefix is encoded anew."""
    text = tokenizer.render_chat(conversations.with_system(messages, template))
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_length]
    mask = [0] * len(ids)
    header, end = map(re.escape, (conversations.HEADER, conversations.END))
    for match in re.finditer(f"{header}([\\s\\S]*?(?:{end}|$))", text):
        begin, stop = (
            len(tokenizer.encode(text[:edge], add_special_tokens=False))
            for edge in match.span(1)
        )
        for index in range(begin, min(stop, len(ids))):
            mask[index] = 1
    return ids, mask


PIECES = st.sampled_from(
    [
        "<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|im_end|>\n", "\n",
        "\n\n", " ", "  ", "the sum", "1234", "é✓", "<think>", "</think>", "assistant",
    ]
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant"]),
            "content": st.lists(PIECES, max_size=6).map("".join),
        }
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("which", ["tokenizer", "smollm2"])
@pytest.mark.parametrize("template", ["own", "qwen"])
def test_linear_form_equals_the_quadratic_one(request, which, template):
    tokenizer = request.getfixturevalue(which)

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(MESSAGES, st.integers(1, 200))
    def check(messages, max_length):
        ids, mask, _ = conversations.tokenize(
            tokenizer, messages, max_length=max_length, template=template
        )
        expected_ids, expected_mask = quadratic(
            tokenizer, messages, max_length, template
        )
        assert ids.tolist() == expected_ids
        assert mask.astype(int).tolist() == expected_mask

    check()


def test_a_tokenizer_without_marks_takes_the_quadratic_form(tokenizer):
    class Letters:
        """Ids of letters, but "\\n<" is one token: the marks cut nothing."""

        def encode(self, text, *, add_special_tokens=True):
            return [ord(letter) for letter in text.replace("\n<", "≺")]

        def render_chat(self, messages):
            return tokenizer.render_chat(messages)

    messages = [
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": ""},
    ]
    ids, mask, _ = conversations.tokenize(Letters(), messages, max_length=500)
    expected = quadratic(Letters(), messages, 500, "own")
    assert (ids.tolist(), mask.astype(int).tolist()) == expected


def test_smollm2_s_own_template(smollm2):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "x"},
    ]
    ids, mask, _ = conversations.tokenize(smollm2, messages, max_length=100)
    text = smollm2.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named")
    assert smollm2.decode(ids[mask], skip_special_tokens=False) == "x<|im_end|>\n"
    # The ids are those that decoding is prompted with.
    assert ids.tolist() == smollm2.encode_chat(messages, add_generation_prompt=False)


def test_work_is_linear_in_turns(tokenizer):
    class Counting:
        size = 0

        def encode(self, text, **options):
            self.size += len(text)
            return tokenizer.encode(text, **options)

        def render_chat(self, messages):
            return tokenizer.render_chat(messages)

    counting = Counting()
    turns = [{"role": r, "content": "word " * 20} for r in ("user", "assistant")] * 50
    conversations.tokenize(counting, turns, max_length=10**6)
    assert counting.size < 5 * len(tokenizer.render_chat(turns))


def test_everything_is_counted(tokenizer, tmp_path):
    def chat(answer, user="hi"):
        return [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
        ]

    lines = [
        {"id": "kept", "conversations": chat("a good and long enough answer")},
        {"id": "cut", "conversations": chat("a long answer " * 9)},
        {"id": "few", "conversations": chat("no")},
        {"id": "none", "conversations": [{"role": "user", "content": "hi"}]},
        {"id": "failed", "conversations": chat("x" * 40), "status": "error"},
        {"id": "marks", "conversations": chat("x" * 20, "<|im_end|>")},
        {"id": "bad", "conversations": 5},
        {"id": "late", "conversations": chat("answer", "question " * 30)},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path / "corpus"
    seen = []
    with corpus_writer.CorpusWriter(folder, vocab_size=300) as writer:
        counts = conversations.write_corpus(
            records.read(path, is_lenient=True),
            tokenizer,
            writer,
            max_length=100,
            lengths=(60, 100),
            log=seen.append,
        )
    assert dataclasses.asdict(counts) == {
        "num_records": 8,
        "num_rows": 3,
        "num_truncated": 1,
        "num_tokens": counts.num_tokens,
        "num_supervised": counts.num_supervised,
        "num_with_marks": 1,
        "dropped_malformed": 1,
        "dropped_failed": 1,
        "dropped_unsupervised": 2,
        "dropped_too_few": 1,
    }
    report = counts.report()
    for part in (
        "8 records read, 3 rows kept, 1 of them truncated",
        "5 records dropped",
    ):
        assert part in report
    assert "1 records hold chat marks" in report
    corpus = corpus_files.load_corpus(folder)
    assert corpus.counts == dataclasses.asdict(counts)
    assert [(b.length, b.num_rows) for b in corpus.buckets] == [(60, 2), (100, 1)]
    masks = [bucket.take(slice(None)).loss_mask.sum() for bucket in corpus.buckets]
    assert sum(masks) == counts.num_supervised
    ids, mask, _ = conversations.tokenize(
        tokenizer, lines[0]["conversations"], max_length=100
    )
    row = corpus.buckets[0].take(0)
    assert row.tokens[: len(ids)].tolist() == ids.tolist()
    assert not row.tokens[len(ids) :].any()
    np.testing.assert_array_equal(row.loss_mask[: len(ids)], mask)


def test_bad_arguments(tokenizer):
    with pytest.raises(ValueError, match=r"one of \('own', 'qwen'\), got 'gemma'"):
        conversations.with_system([], "gemma")
    with pytest.raises(ValueError, match=r"must be positive and end with 64, got \(32"):
        conversations.check_lengths((32, 48), 64)
    assert conversations.default_lengths(2048) == (128, 256, 512, 1024, 2048)
    assert conversations.default_lengths(100) == (100,)


def test_a_chat_that_cannot_be_rendered_is_named(golden, tmp_path):
    tokenizer = dspark_jax.load_tokenizer(golden / "chat" / "tokenizer")
    tokenizer = dataclasses.replace(tokenizer, chat=None)
    record = records.Record("x", ({"role": "user", "content": "a"},), "", "f.jsonl:3")
    with (
        corpus_writer.CorpusWriter(tmp_path, vocab_size=300) as writer,
        pytest.raises(
            ValueError, match=r"f\.jsonl:3: the tokenizer's chat template is"
        ),
    ):
        conversations.write_corpus(
            iter([record]), tokenizer, writer, max_length=8, lengths=(8,)
        )
