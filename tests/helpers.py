"""What several test files share: command lines and runs, conversations, captured states, toy targets and drafts."""

import gzip
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import threading
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DeepseekV3Config, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import train
from data.conversations import read_conversations
from draft_deepseek import (
    DeepseekV3Eagle3DraftModel,
    Eagle3DeepseekMLAAttention,
    Eagle3MLAConfig,
    RowChunks,
    TTTLoss,
    build_rows,
)
from draft_kimi_k3 import KimiK3Eagle3Config, KimiK3Eagle3DraftModel
from measuring.step import Cell
from target.model import Target
from test_drafts import K3, SIZES, make_draft

# ----------------------------------------------------------------------------------------------- command lines and runs

ROOT = Path(__file__).parent.parent


def error_line(argv, capsys, code=2) -> str:
    """The one line that train.py ends with."""
    assert train.cli(["--device", "cpu", *map(str, argv)]) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ": error: " in said
    return said


FORK = multiprocessing.get_context("fork")  # a child has all that is imported and parsed: a run starts in a second

SHORT = ["--row-tokens", "256", "--ttt-steps", "3", "--eval-rows", "1", "--decode-prompts", "1", "--decode-tokens", "9"]
SHORT += ["--save-every", "3", "--device", "cpu", "--documents", "100"]


def command(runs, name, *flags):
    return ["--runs", str(runs), "--name", name, *SHORT, *map(str, flags)]


def start(argv, output, patch=lambda: None):
    """`train.py argv` as a process of its own, its output in a file; `patch()` is called in it first."""

    def child():
        tqdm.set_lock(threading.RLock())  # a fork shares the parent's, which a killed run would hold for ever
        with output.open("w") as sys.stdout:
            sys.stderr = sys.stdout
            patch()
            code = train.cli(argv)
        os._exit(code)  # not through the parent's own clean-up

    process = FORK.Process(target=child)
    process.start()
    return process


def finish(process, output, code):
    process.join(200)
    assert process.exitcode == code, f"exit code {process.exitcode}: {output.read_text()[-3000:]}"
    return output.read_text()


def weights(runs, name, step):
    return load_file(runs / name / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def log(runs, name):
    return [json.loads(line) for line in (runs / name / "log.jsonl").read_text().splitlines()]


def assert_same_run(runs, one, two, step):
    """Bit for bit: the weights, and what every step logged but its speed."""
    a, b = weights(runs, one, step), weights(runs, two, step)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    logs = [[{k: x for k, x in line.items() if k != "tokens_per_second"} for line in log(runs, n)] for n in (one, two)]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == list(range(1, step + 1))


def complaint(argv, capsys) -> str:
    """The one line that train.py ends with, by exit code 2 or a ValueError."""
    with pytest.raises((SystemExit, ValueError)) as stopped:
        train.main(argv)
    message = capsys.readouterr().err if isinstance(stopped.value, SystemExit) else str(stopped.value)
    assert message.strip().count("\n") == 0
    assert not isinstance(stopped.value, SystemExit) or stopped.value.code == 2
    return message


# -------------------------------------------------------------------------------------------------------- conversations

BOS, EOS, THINK, UNTHINK = "<|begin_of_sentence|>", "<|end_of_sentence|>", "<think>", "</think>"
SPECIAL = [BOS, EOS, "<|User|>", "<|Assistant|>", "<|tool_output|>", THINK, UNTHINK, "<|im_end|>", "<|im_middle|>"]
SPECIAL += ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|call|>", "<|im_start|>"]


def deepseek_template(generation: str, answer: str) -> str:
    """The DeepSeek grammar: system prompts first, no end of a user turn, nothing between tool output and answer."""
    return (
        "{{ bos_token }}{% set ns = namespace(tool=false) %}"
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.tool = false %}<|User|>{{ m.content }}"
        "{% elif m.role == 'tool' %}{% set ns.tool = true %}<|tool_output|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}{% if not ns.tool %}<|Assistant|>{% endif %}" + answer + EOS + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt and not ns.tool %}<|Assistant|>" + generation + "{% endif %}"
    )


def kimi_template(generation: str, answer: str) -> str:
    return (
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>" + answer +
        "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|im_end|>"
        "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>" + generation + "{% endif %}"
    )  # fmt: skip


TEMPLATES = {
    "V3": deepseek_template("", "{{ m.content }}"),
    "V3.1": deepseek_template(UNTHINK, "{% if not ns.tool %}</think>{% endif %}{{ m.content.split('</think>')[-1] }}"),
    "R1": deepseek_template("<think>\n", "{{ m.content.split('</think>')[-1] }}"),
    "R1 earlier": deepseek_template(
        "<think>\n",
        "{% if loop.last %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content.split('</think>')[-1] }}",
    ),
    "K2": kimi_template("", "{{ m.content or '' }}"),
    "K2 thinking": kimi_template(
        "",
        "<think>{% if m.tool_calls and loop.last %}{{ m.reasoning_content }}{% endif %}</think>{{ m.content or '' }}",
    ),
    "K2.5": kimi_template(THINK, "<think></think>{{ m.content or '' }}"),
    "K2.5 instant": kimi_template("<think></think>", "<think></think>{{ m.content or '' }}"),
    "ChatML": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "ChatML untrimmed": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "between": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{{ '\n' if not loop.last or add_generation_prompt }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
}


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    stand_in = bytes_to_unicode()
    return wrap(Tokenizer(models.BPE(vocab={stand_in[b]: b for b in range(256)}, merges=[])), template)


def wrap(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=template)


def turns(*contents: str, system: str | None = None) -> list[dict]:
    roles = ["user", "assistant"] * len(contents)
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def write_lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read_chats(tmp_path, tokenizer, *records, row_tokens=512, **options):
    path = write_lines(tmp_path / "data.jsonl", *records)
    return read_conversations([path], tokenizer, row_tokens, progress=False, **options)


def same_documents(a, b) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.tokens, y.tokens) and torch.equal(x.loss_mask, y.loss_mask) and x.source == y.source
        for x, y in zip(a, b, strict=True)
    )


GOOD = {"messages": turns("Q", "A")}


def many_chats(tmp_path):
    rng = random.Random(2)
    records = [
        {"messages": turns(*("x" * rng.randrange(1, 40) for _ in range(rng.choice([2, 4, 3]))))} for _ in range(60)
    ]
    return write_lines(tmp_path / "many.jsonl", *records, "broken")


# --------------------------------------------------------------------------- captured states, as every tool writes them

H, V, AUX = 24, 262, (1, 2, 3)
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:150].sort().values


def batch_of(documents, states, head, draft_ids=DRAFT_IDS):
    """Documents in rows of two, as build_rows makes them from unshifted tensors."""
    rows, t = [(0, 1), (2, 3), (4,)], 30
    out = {}
    for r, row in enumerate(rows):
        begin = 0
        for number, i in enumerate(row):
            n = len(documents[i].tokens)
            values = {"tokens": documents[i].tokens, "document": torch.full((n,), number), "position": torch.arange(n)}
            values |= {"loss_mask": documents[i].loss_mask, "features": states[i][0], "last_hidden": states[i][1]}
            for name, x in values.items():
                fill = -1 if name == "document" else 0
                out.setdefault(name, torch.full((len(rows), t, *x.shape[1:]), fill, dtype=x.dtype))
                out[name][r, begin : begin + n] = x
            begin += n
    return build_rows(draft_ids, **out, head=head, steps=4)


def check_equal(rows, expected):
    for name in ("document", "position", "anchors", "teacher_index", "valid", "denominators"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name
    fed = expected.position > 0  # a document's first token is fed nowhere
    assert torch.equal(rows.tokens[fed], expected.tokens[fed])
    torch.testing.assert_close(rows.features.float(), expected.features, atol=1e-6, rtol=0)
    learned = expected.teacher_index[expected.teacher_index >= 0].unique()
    assert len(learned) > 3
    taught = torch.zeros(expected.teacher.shape[:2], dtype=torch.bool)
    for r in range(len(taught)):
        taught[r, expected.teacher_index[:, r][expected.teacher_index[:, r] >= 0]] = True
    torch.testing.assert_close(rows.teacher[taught], expected.teacher[taught], atol=1e-6, rtol=0)


def four_layers(features, last):
    return torch.cat([features.view(len(features), 3, H), last[:, None]], 1).contiguous()


def save_layers(path, document, features, last):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"hidden_states": four_layers(features, last), "token_ids": document.tokens}, path)


def write_index(path, documents):
    rows = [{"input_ids": d.tokens.tolist(), "loss_mask": d.loss_mask.int().tolist()} for d in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def speculators(folder, documents, states, raw_last):
    for i, (d, (features, _), last) in enumerate(zip(documents, states, raw_last, strict=True)):
        save_layers(folder / f"hidden_states/hs_{i}.safetensors", d, features, last)
    write_index(folder / "index.jsonl", documents)


def connector(folder, documents, states, raw_last):
    for i, (d, (features, _), last) in enumerate(zip(documents, states, raw_last, strict=True)):
        save_layers(folder / f"cmpl-{i}.safetensors", d, features, last)
        (folder / f"cmpl-{i}.safetensors.lock").touch()  # vLLM leaves it behind
    write_index(folder / "index.jsonl", documents)


def specforge(folder, documents, states, suffix):
    for i, (d, (features, last)) in enumerate(zip(documents, states, strict=True)):
        path = folder / f"rows_{i // 2 * 2}-{i // 2 * 2 + 2}" / f"data_{i}.ckpt{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {"input_ids": d.tokens, "loss_mask": d.loss_mask.long()}
        held |= {"hidden_state": last[None], "aux_hidden_state": features[None]}
        with (gzip.open if suffix else open)(path, "wb") as file:
            torch.save(held, file)


def automodel(folder, documents, states, target, topk=0, left=False, draft_ids=DRAFT_IDS, shard_size=3):
    """The producer's own recipe: pad, then move ids, masks and logits left by one with zeros behind, features not."""
    size, samples = 17, []  # the longest fills its row

    def pad(x):
        n = size - len(x)
        return F.pad(x, (0,) * (2 * x.ndim - 2) + ((n, 0) if left else (0, n)))

    def left_by_one(x):
        return torch.cat([x[1:], torch.zeros_like(x[:1])])

    for d, (features, last) in zip(documents, states, strict=True):
        ids, mask = left_by_one(pad(d.tokens)), left_by_one(pad(d.loss_mask.long()))
        logits = left_by_one(pad(target.head(last)))
        row = {"input_ids": ids, "attention_mask": pad(torch.ones(len(d.tokens), dtype=torch.long)), "loss_mask": mask}
        row["aux_hidden_states"] = pad(features)
        row["position_mask"] = (torch.isin(logits.argmax(-1), draft_ids) & mask.bool())[:, None]
        p = logits[:, draft_ids].float().softmax(-1)
        if topk:
            values, indices = p.topk(topk)
            row["target_probs_values"] = values / values.sum(-1, keepdim=True)
            row["target_probs_indices"] = indices.int()
        else:
            row["target_probs"] = p
        samples.append(row)
    for i in range(0, len(samples), shard_size):
        shard = {name: torch.stack([row[name] for row in samples[i : i + shard_size]]) for name in samples[0]}
        save_file(shard, folder / f"shard-{i // shard_size:06d}.safetensors")
    save_file({"weight": target.embed_tokens.weight.data}, folder / "target_embeddings.safetensors")
    manifest = {"format_version": 2, "target_model": "m", "target_vocab_size": V, "draft_vocab_size": len(draft_ids)}
    manifest |= {"seq_length": size, "dtype": "fp32", "num_samples": len(samples), "shard_size": shard_size}
    manifest |= {"target_probs_topk": topk, "aux_hidden_dim": 3 * H, "aux_layer_ids": list(AUX)}
    manifest |= {"selected_token_ids": draft_ids.tolist()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


LAYOUTS = ["own", "speculators", "arrow", "connector", "specforge", "specforge.gz", "automodel", "automodel-left"]


def some_file(folder):
    return next(x for x in sorted(folder.rglob("*")) if x.name.endswith(("1.safetensors", "1.ckpt", "1.ckpt.gz")))


def rewrite(path, change):
    """The tensors of a file of any layout, changed."""
    if path.suffix == ".safetensors":
        return save_file({k: x.contiguous() for k, x in change(load_file(path)).items()}, path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        held = torch.load(file, weights_only=True)
    with opened(path, "wb") as file:
        torch.save(change(held), file)


def not_finite(held):
    name = next(k for k in ("hidden_states", "hidden_state", "target_probs") if k in held)
    held[name].view(-1)[:: held[name][0].numel() // 2 + 1] = float("nan")  # in every row
    return held


def with_value(names, change):
    def changed(held):
        name = next(k for k in names if k in held)
        return held | {name: change(held[name])}

    return changed


# --------------------------------------------------------------------------------------------------- targets and drafts


def next_logits(target, tokens):
    return target.head(target.states(tokens[None])[1][0])


TOY = SIZES | {"vocab_size": 32, "draft_vocab_size": 32, "pad_token_id": None}
TOY |= {"hidden_size": 32, "target_hidden_size": 32}
NEXT = torch.randperm(32, generator=torch.Generator().manual_seed(0))


class Toy:
    """A deterministic target: after token x comes NEXT[x]. Its last hidden state is the token, one-hot."""

    device, vocab_size, cache_name, stop_token_ids = torch.device("cpu"), 32, None, []

    def states(self, tokens):
        last = F.one_hot(tokens, 32).float()
        return torch.cat([last, last.roll(3, -1), last.roll(7, -1)], -1), last

    def capture(self, texts):
        return [self.states(text) for text in texts]

    def head(self, hidden):
        return 9.0 * F.one_hot(NEXT[hidden.argmax(-1)], 32).float()

    def greedy(self, prompt, n):
        tokens = [prompt[-1]]
        for _ in range(n):
            tokens.append(NEXT[tokens[-1]])
        return torch.stack(tokens[1:])


def toy_rows(draft, text, loss_mask, make=build_rows):
    """One row batch of token rows [B,T] that the toy target reads."""
    features, last = Toy().states(text)
    position = torch.arange(text.shape[1]).expand_as(text)
    return make(draft.draft_ids, text, torch.zeros_like(text), position, features, loss_mask, last, Toy().head)


def toy_batch(draft, text, loss_mask):
    """The same as the loop gets it."""
    return SimpleNamespace(rows=lambda: toy_rows(draft, text, loss_mask, RowChunks))


PROMPT = torch.tensor([5, 9, 2])


def toy_draft(kind, steps, overfit=False):
    """A draft trained for `steps` steps on the toy target's continuations of random prompts, or of PROMPT alone."""
    torch.manual_seed(0)
    draft = (DeepseekV3Eagle3DraftModel if kind == "deepseek" else KimiK3Eagle3DraftModel)(
        TOY | ({"rope_theta": 10000.0} if kind == "deepseek" else K3)
    )
    draft.freeze_embeddings()
    loss = TTTLoss(draft)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for i in range(steps):
        prompts = PROMPT[None] if overfit else torch.randint(32, (2, 3))
        text = torch.stack([torch.cat([p, Toy().greedy(p, 69)]) for p in prompts])
        value, _ = loss(toy_rows(draft, text, (torch.arange(72) >= 3).expand_as(text)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - i / steps) + 1e-4
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return draft


def sharpened(model):
    """A target of large random weights: what it says depends on the whole text."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn_like(p) * (2 if p.shape[0] == 12 else 1.5 / p.shape[-1] ** 0.5))
    return Target(model, (0, 1, 2))


def attention_target():
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    experts |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 3}
    sizes = {"hidden_size": 20, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3}
    sizes |= {"intermediate_size": 20, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6}
    sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 5, "vocab_size": 12, "eos_token_id": 3, "pad_token_id": None}
    sizes |= {"bos_token_id": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return sharpened(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**experts, **sizes)))


def small_draft(variant="deepseek", width=20, seed=0):
    """An untrained draft over 7 of 12 tokens, of large random weights."""
    sizes = {"vocab_size": 12, "draft_vocab_size": 12, "target_hidden_size": width, "pad_token_id": None}
    draft, cfg = make_draft(variant, seed, **sizes)
    reduced = type(draft)(cfg | {"draft_vocab_size": 7})
    state = draft.state_dict()
    state |= {"lm_head.weight": state["lm_head.weight"][:7], "d2t": reduced.d2t, "t2d": reduced.t2d}
    reduced.load_state_dict(state)
    reduced.set_vocab_mapping(torch.tensor([8, 1, 10, 3, 0, 6, 11]))
    return reduced


PROMPTS = [torch.tensor([4, 9, 2, 2, 11, 0]), torch.tensor([7]), torch.tensor([1, 5, 3])]


class Table:
    """What comes next depends on the last two tokens, by a table of random logits."""

    device, vocab_size, cache_name, stop_token_ids = torch.device("cpu"), 12, None, []
    weight = 1.5 * torch.randn(12, 24, generator=torch.Generator().manual_seed(3))

    def states(self, tokens):
        one_hot = F.one_hot(tokens, 12).float()
        last = torch.cat([one_hot, F.pad(one_hot, (0, 0, 1, -1))], -1)
        return torch.cat([last, last.roll(5, -1), last.roll(9, -1)], -1), last

    def capture(self, texts):
        states = self.states(pad_sequence(texts, batch_first=True))
        return [[x[b, : len(text)] for x in states] for b, text in enumerate(texts)]

    def head(self, hidden):
        return hidden @ self.weight.T


def exact_next(text, temperature, top_p):
    """The distribution behind a text, in plain Python."""
    x = Table().weight[:, text[-1]] + (Table().weight[:, 12 + text[-2]] if len(text) > 1 else 0)
    weights = {i: math.exp(v / temperature) for i, v in enumerate(x.tolist())}
    total, kept, held = sum(weights.values()), {}, 0.0
    for i in sorted(weights, key=weights.get, reverse=True):
        if held < top_p * total:
            kept[i], held = weights[i], held + weights[i]
    return {i: weight / held for i, weight in kept.items()}


def exact_joint(prompt, n, temperature, top_p):
    """Probability of every continuation of n tokens."""
    joint = {(): 1.0}
    for _ in range(n):
        joint = {
            (*text, x): p * p_x
            for text, p in joint.items()
            for x, p_x in exact_next([*prompt, *text], temperature, top_p).items()
        }
    return joint


# ------------------------------------------------------------------------------------------------- attention and memory


def attention_of(cls=Eagle3DeepseekMLAAttention, fuse_input=True, **keys):
    config = (Eagle3MLAConfig if cls is Eagle3DeepseekMLAAttention else KimiK3Eagle3Config).from_any(SIZES | keys)
    return cls(config, fuse_input=fuse_input)


def hf_attention(width=None, **rope):
    """transformers' DeepSeek-V3 attention with random weights, its config and its cos and sin."""
    sizes = {
        k: v for k, v in SIZES.items() if k not in ("target_hidden_size", "num_aux_hidden_states", "draft_vocab_size")
    }
    sizes |= {"attn_implementation": "eager"} | rope | ({"hidden_size": width} if width else {})
    config = DeepseekV3Config(**deepcopy(sizes))
    theirs = DeepseekV3Attention(config, layer_idx=0)
    theirs.kv_a_layernorm.variance_epsilon = config.rms_norm_eps  # theirs is fixed at 1e-6
    if config.q_lora_rank:
        theirs.q_a_layernorm.variance_epsilon = config.rms_norm_eps
    return theirs, DeepseekV3RotaryEmbedding(config)


def allocated(work):
    """Bytes of the largest allocation and of the peak above the start; the profiler sees inside operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(sizes), max(itertools.accumulate(sizes))


def reachable(fast):
    """Hidden states at the valid slots, slot after slot."""
    return fast.hidden.movedim(0, 2)[fast.rows.valid.movedim(0, 2)]


# ------------------------------------------------------------------------------------------------------------ measuring

TINY_CELL = Cell(size="tiny", slots=96, share=0.5)
