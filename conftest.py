"""Fixtures that several test files share."""

import json
import os
import shutil
import signal
import sys
import types

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads, as in train.py: spinning threads cost seconds

import pytest
import torch
import transformers
from tqdm import tqdm

from data.conversations import answered
from data.corpus import python_documents
from data.documents import Document
from states.write import write_capture
from target import tiny
from target.ends import load_ends
from target.model import load_target
from target.tiny import byte_tokenizer
from tests.helpers import H, V, automodel, connector, specforge, speculators

torch.set_num_threads(1)  # for what is made once
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
tqdm.monitor_interval = 0  # its thread may hold the bars' lock while a process is forked, which then waits for ever


@pytest.fixture(autouse=True)
def one_thread():
    """Toys are faster on one, sums come out the same, and a process that is forked may not use the threads of others.

    Set for each test: what runs in-process (`bench.py --threads`) sets its own.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def short_training():
    """Built-in targets are made from little text; what the tests claim of them does not depend on it."""
    shortest = sorted(python_documents(True), key=lambda pair: len("".join(pair)))[:40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "BATCH_TOKENS", 512)
        patch.setattr(tiny, "python_documents", lambda held_out, seed=0: list(shortest))
        yield


@pytest.fixture(scope="session")
def tiny_targets(tmp_path_factory, short_training):
    """Directories of both built-in targets, hardly trained."""
    folder = tmp_path_factory.mktemp("targets")
    return {x: tiny.tiny_target(x, folder / f"tiny-{x}", progress=False, steps=3) for x in tiny.TINY_STEPS}


@pytest.fixture(scope="session")
def runs(tmp_path_factory, tiny_targets):
    """A folder of runs that holds those targets as if they were trained in full."""
    folder = tmp_path_factory.mktemp("runs")
    for preset, made in tiny_targets.items():
        path = shutil.copytree(made, folder / made.name)
        recipe = json.loads((path / "tiny_target.json").read_text())
        recipe["steps"] = tiny.TINY_STEPS[preset]
        (path / "tiny_target.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="session")
def held_out(tiny_targets):
    tokenizer = load_target(tiny_targets["deepseek-v3"]).tokenizer
    return answered(tokenizer, python_documents(held_out=True)[:12])


# ------------------------------------------------------------------------------------------------------ captured states


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A random DeepSeek-V3 of seven layers, saved in several files, whose final norm is not one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": H, "intermediate_size": 40, "num_attention_heads": 2, "q_lora_rank": 8}
    sizes |= {
        "num_key_value_heads": 2,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    }
    sizes |= {"num_hidden_layers": 7, "first_k_dense_replace": 7, "tie_word_embeddings": False}
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes, rope_theta=1e4, pad_token_id=None)
    )
    with torch.no_grad():
        model.model.norm.weight.normal_(1, 0.5)
        model.lm_head.weight.normal_(0, 1)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.normal_(0, 0.5)
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session", name="target")
def captured_target(home):
    return load_target(home)


@pytest.fixture(scope="session")
def ends(home):
    return load_ends(home)


@pytest.fixture(scope="session")
def documents():
    generator = torch.Generator().manual_seed(1)
    made = []
    for i, length in enumerate([9, 17, 2, 12, 5]):
        loss_mask = torch.rand(length, generator=generator) < 0.6
        loss_mask[-1] = i < 4  # one ends in a prompt
        made.append(Document(torch.randint(V, (length,), generator=generator), loss_mask, str(i)))
    return made


@pytest.fixture(scope="session")
def states(target, documents):
    return target.capture([d.tokens for d in documents])


@pytest.fixture(scope="session")
def raw_last(target, documents):
    """The last layer's output before the final norm, from a hook on it, in the batch that `states` come from."""
    lengths, found = [len(d.tokens) for d in documents], []
    handle = target.layers[-1].register_forward_hook(lambda module, args, out: found.append(out.detach()))
    target.capture([d.tokens for d in documents])
    handle.remove()
    ((rows,), (order,)) = found, target.batches(lengths)
    return [rows[order.index(i), :length].clone() for i, length in enumerate(lengths)]


@pytest.fixture
def layout(tmp_path, monkeypatch, documents, states, raw_last, target):
    """Makes a directory of the given layout, without touching disk twice."""

    def make(kind):
        folder = tmp_path / kind
        folder.mkdir()
        if kind == "own":
            write_capture(folder, target, documents, torch.float32)
        elif kind == "speculators":
            speculators(folder, documents, states, raw_last)
        elif kind == "arrow":
            speculators(folder, documents, states, raw_last)
            (folder / "index.jsonl").rename(folder / "data-00000.arrow")
            rows = {
                "input_ids": [d.tokens.tolist() for d in documents],
                "loss_mask": [d.loss_mask.int().tolist() for d in documents],
            }
            table = types.SimpleNamespace(with_format=lambda kind: rows)
            monkeypatch.setitem(
                sys.modules, "datasets", types.SimpleNamespace(load_from_disk=lambda path, keep_in_memory: table)
            )
        elif kind == "connector":
            connector(folder, documents, states, raw_last)
        elif kind.startswith("specforge"):
            specforge(folder, documents, states, kind.removeprefix("specforge"))
        else:
            automodel(folder, documents, states, target, left=kind == "automodel-left")
        return folder

    return make
