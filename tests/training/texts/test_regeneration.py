"""Answers to given prompts: the library's words, several turns, drops, going on."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.targets.chatml import ChatFormat
from dspark_jax.training.texts import answers, corpus_files, records, regeneration

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = answers.AnswerConfig(
    temperature=1.0, top_p=0.9, max_new_tokens=12, batch_rows=3
)
PROMPTS = (
    {"id": "one", "prompt": "hello"},
    {
        "id": "two",
        "conversations": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "What is it?"},
            {"role": "assistant", "content": "somebody's answer"},
            {"role": "user", "content": "And why?"},
        ],
    },
    {"id": "three", "turns": ["a" * 40, "b", "c"]},
    {"id": "four", "messages": [{"role": "assistant", "content": "no question"}]},
    {"id": "five", "prompt": "short"},
)


def read(tmp_path, prompts=PROMPTS):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return records.read(path)


def run(chat_target, tmp_path, folder, prompts=PROMPTS, config=CONFIG, **options):
    models = options.pop(
        "models", answers.Models(chat_target.target, chat_target.params)
    )
    tokenizer = options.pop("tokenizer", chat_target.tokenizer)
    return regeneration.regenerate(
        tmp_path / folder,
        read(tmp_path, prompts),
        models,
        tokenizer,
        config,
        **{"max_length": 128, "lengths": (64, 128), "min_loss_tokens": 1, **options},
    )


def texts(folder):
    chats = records.read(folder / regeneration.CONVERSATIONS)
    return {chat.name: chat.messages for chat in chats}


def all_rows(folder):
    corpus = corpus_files.load_corpus(folder)
    taken = [bucket.take(slice(None)) for bucket in corpus.buckets]
    return [
        (tokens, mask)
        for rows in taken
        for tokens, mask in zip(rows.tokens, rows.loss_mask, strict=True)
    ]


def test_answers_are_the_library_s(chat_target, tmp_path):
    counts = run(chat_target, tmp_path, "out")
    target, tokenizer = chat_target.target, chat_target.tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    key = jax.random.fold_in(jax.random.key(0), jnp.uint32(answers._number("one")))
    generation = jax.jit(
        functools.partial(
            dspark_jax.autoregressive_generate,
            target=target,
            max_new_tokens=12,
            stop_tokens=tokenizer.stop_tokens,
        )
    )(
        key[None],
        tokens,
        np.asarray([len(ids)], np.int32),
        target_params=chat_target.params,
        sampling=CONFIG.sampling(),
    )
    expected = generation.tokens[0, : int(generation.lengths[0])].tolist()
    (row,) = (
        (tokens, mask)
        for tokens, mask in all_rows(tmp_path / "out")
        if tokens[: len(ids)].tolist() == ids
    )
    assert row[0][: len(expected)].tolist() == expected
    assert np.flatnonzero(row[1]).tolist() == list(range(len(ids), len(expected)))
    assert counts.num_records == 5
    assert counts.dropped_no_user == 1


def stopping(chat_target, tokens):
    """A tokenizer after whose answers any of these tokens ends the turn."""
    return dataclasses.replace(chat_target.tokenizer, stop_tokens=tokens)


def test_every_user_turn_is_answered(chat_target, tmp_path):
    everything = tuple(range(128))  # every answer is one token
    counts = run(
        chat_target,
        tmp_path,
        "out",
        tokenizer=stopping(chat_target, everything),
        lengths=(128,),
    )
    assert counts.num_answers == 1 + 2 + 3 + 1
    assert counts.num_cut == 0
    assert counts.num_supervised == 7
    found = texts(tmp_path / "out")
    assert [m["role"] for m in found["two"]] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert found["two"][2]["content"] != "somebody's answer"
    assert [m["content"] for m in found["three"][::2]] == ["a" * 40, "b", "c"]
    start, end = chat_target.tokenizer.control_tokens
    for tokens, mask in all_rows(tmp_path / "out"):
        for place in np.flatnonzero(mask[:-1]):
            if place + 1 < 128 and tokens[place] != end and tokens[place + 1 :].any():
                assert tokens[place + 1] == end  # the turn is closed, unsupervised
                assert not mask[place + 1]
    decoded = {
        chat_target.tokenizer.decode(tokens, skip_special_tokens=False).rstrip("!")
        for tokens, _ in all_rows(tmp_path / "out")
    }
    assert any(
        "Be kind.<|im_end|>\n<|im_start|>user\nWhat is it?" in t for t in decoded
    )
    assert start != end


def test_a_cut_answer_ends_its_conversation(chat_target, tmp_path):
    tokenizer = stopping(chat_target, ())
    target = dataclasses.replace(chat_target.target.config, stop_tokens=())
    models = answers.Models(
        chat_target.target._replace(config=target), chat_target.params
    )
    counts = run(chat_target, tmp_path, "out", tokenizer=tokenizer, models=models)
    assert counts.num_cut == counts.num_answers == 4
    assert counts.num_supervised == 48
    assert len(texts(tmp_path / "out")["three"]) == 2


def test_batches_change_nothing_and_runs_go_on(chat_target, tmp_path):
    run(chat_target, tmp_path, "whole")
    alone = dataclasses.replace(CONFIG, batch_rows=1)
    run(chat_target, tmp_path, "alone", config=alone)
    assert texts(tmp_path / "alone") == texts(tmp_path / "whole")
    for number in range(1, 4):
        counts = run(
            chat_target, tmp_path, "parts", resume=True, should_stop=lambda: True
        )
        assert counts.num_records == min(3 * number, 5)
    assert texts(tmp_path / "parts") == texts(tmp_path / "whole")
    rows = [
        {t.tobytes() for t, _ in all_rows(tmp_path / n)} for n in ("whole", "parts")
    ]
    assert rows[0] == rows[1]
    with pytest.raises(FileExistsError, match="give another folder"):
        run(chat_target, tmp_path, "whole")
    other = dataclasses.replace(CONFIG, temperature=0.5)
    with pytest.raises(ValueError, match=r"made with temperature 1\.0, not 0\.5"):
        run(chat_target, tmp_path, "whole", config=other, resume=True)


def test_a_drafter_gives_the_same_greedy_words(chat_target, tmp_path, golden):
    greedy = answers.AnswerConfig(temperature=0, max_new_tokens=12, batch_rows=3)
    run(chat_target, tmp_path, "plain", config=greedy)
    drafter, params = dspark_jax.load_drafter(
        golden / "cases" / "dspark_vanilla_b4" / "drafter", chat_target.target
    )
    models = answers.Models(chat_target.target, chat_target.params, drafter, params)
    run(chat_target, tmp_path, "drafted", config=greedy, models=models)
    assert texts(tmp_path / "drafted") == texts(tmp_path / "plain")


def test_what_is_dropped_is_written_down(chat_target, tmp_path):
    last = chat_target.target.config.max_position
    prompts = (PROMPTS[3], {"id": "long", "prompt": "x" * (last + 5)}, PROMPTS[0])
    counts = run(chat_target, tmp_path, "out", prompts, min_loss_tokens=13)
    assert (counts.dropped_no_user, counts.dropped_too_long) == (1, 1)
    assert (counts.dropped_too_few, counts.num_rows) == (1, 0)
    lines = (tmp_path / "out" / "conversations.jsonl").read_text().splitlines()
    found = {line["id"]: line for line in map(json.loads, lines)}
    assert {k: line["error"] for k, line in found.items()} == {
        "four": "no_user",
        "long": "too_long",
        "one": "too_few",
    }
    assert found["four"]["conversations"] == PROMPTS[3]["messages"]
    assert "3 records dropped: 1 without a user turn, 1 too long, 1 with" in (
        counts.report()
    )


def test_templates_that_drop_thoughts_are_tokenised_as_text(chat_target, tmp_path):
    chat = ChatFormat(has_thinking=True, drops_thoughts=True)
    tokenizer = dataclasses.replace(stopping(chat_target, tuple(range(128))), chat=chat)
    counts = run(chat_target, tmp_path, "out", PROMPTS[1:2], tokenizer=tokenizer)
    assert counts.num_answers == 2
    ((tokens, mask),) = all_rows(tmp_path / "out")
    text = chat_target.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.count("<think>\n\n</think>\n\n") == 1  # of the last turn only
    marked = chat_target.tokenizer.decode(tokens[mask], skip_special_tokens=False)
    assert marked.count("<|im_end|>\n") == 2


def test_an_id_is_used_once(chat_target, tmp_path):
    prompts = ({"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"})
    with pytest.raises(ValueError, match=r":2: id 'x' was used before, in .*:1$"):
        run(chat_target, tmp_path, "out", prompts)


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_rows"])
def test_bad_settings(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        answers.AnswerConfig(**{name: 0})
