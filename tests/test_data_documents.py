"""Claims about documents: anchors, a sequence over one array, and a split that depends on content alone."""

import random

import numpy as np
import pytest
import torch

from data.conversations import read_conversations
from data.documents import Document, prompt_and_answer, split
from data.packing import anchors_of
from tests.helpers import TEMPLATES, chat_tokenizer, many_chats, read_chats, same_documents, turns


def test_anchors_are_the_slots_within_reach_of_a_learned_token():
    mask = torch.zeros(20, dtype=torch.bool)
    mask[9:12] = True
    assert anchors_of(mask, 7) == 9  # slots 2..10
    assert anchors_of(mask, 1) == 3 and anchors_of(mask[:1], 7) == 0 and anchors_of(~mask[:2], 3) == 1


def test_a_document_is_cut_at_its_first_answer_or_in_its_middle():
    mask = torch.zeros(20, dtype=torch.bool)
    mask[5:12] = mask[15:18] = True
    document, whole = Document(torch.arange(20), mask, "a"), Document(torch.arange(4), torch.ones(4).bool(), "b")
    assert [x.tolist() for x in prompt_and_answer(document)] == [[*range(5)], [*range(5, 12)]]
    assert [x.tolist() for x in prompt_and_answer(document, middle=True)] == [[*range(8)], [*range(8, 12)]]
    assert [x.tolist() for x in prompt_and_answer(whole)] == [[], [*range(4)]]


def test_documents_are_a_sequence_over_one_array(tmp_path):
    documents, _ = read_conversations([many_chats(tmp_path)], chat_tokenizer(TEMPLATES["V3"]), 64, progress=False)
    assert documents.tokens.dtype == torch.int32 and sum(len(d.tokens) for d in documents) == len(documents.tokens)
    listed = list(documents)
    assert (
        isinstance(listed[0], Document)
        and same_documents(documents[3:11:2], listed[3:11:2])
        and same_documents([documents[-1]], listed[-1:])
    )
    assert documents[3:11].tokens.data_ptr() == documents.tokens.data_ptr()
    with pytest.raises(IndexError):
        documents[len(documents)]


def test_the_split_is_by_content_and_the_same_for_every_seed_and_order(tmp_path):
    tokenizer, rng = chat_tokenizer(TEMPLATES["R1"]), random.Random(3)
    chats = [turns("Q", f"<think>\nhm</think>{i}", "P", f"<think>\nso</think>{i * i}") for i in range(400)]
    records = [{"messages": chat} for chat in chats + chats[:50]]
    rng.shuffle(records)
    documents, _ = read_chats(tmp_path, tokenizer, *records)
    assert len(documents) == 900

    def texts(part):
        return sorted(tuple(d.tokens.tolist()) for d in part)

    train, held_out = split(documents, 0.1, seed=0)
    assert len(train) + len(held_out) == 900 and 40 < len(held_out) < 140
    assert not {d.source for d in train} & {d.source for d in held_out}
    assert not set(texts(train)) & set(texts(held_out))
    again, other = split(documents, 0.1, seed=0), split(documents, 0.1, seed=1)
    assert same_documents(again[0], train) and same_documents(again[1], held_out)
    assert texts(other[1]) == texts(held_out) and [d.source for d in other[0]] != [d.source for d in train]
    rng.shuffle(records)
    shuffled, _ = read_chats(tmp_path, tokenizer, *records[:300])
    assert set(texts(split(shuffled, 0.1)[1])) <= set(texts(held_out))  # neither order nor other data matter
    few, _ = read_chats(tmp_path, tokenizer, *({"messages": chat} for chat in chats[:2]))
    for share in (1e-6, 1 - 1e-6):
        assert [len(part) for part in split(few, share)] == [2, 2]
    with pytest.raises(ValueError, match="two different ones"):
        split(few[:2], 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split(few, np.nan)
