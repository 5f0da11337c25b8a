"""The built-in targets: a small model of a preset's architecture and its tokenizer, trained in a minute on a CPU."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data.conversations import answered
from data.corpus import python_documents
from data.documents import Document
from data.files import replace_with, to_json
from target.tiny_kimi_k3 import TinyKimiK3Config, TinyKimiK3ForCausalLM

# Ids 256 and up, behind the bytes.
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, EOS, _, _, END = range(256, 262)
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% elif message.role == 'user' %}<|user|>{{ message.content }}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {"vocab_size": 262, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64}
SIZES |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
SIZES |= {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False}
TINY_STEPS = {"deepseek-v3": 200, "kimi-k3": 200}  # about 50 s on two cores


def tiny_target(preset: str, directory, seed: int = 0, progress: bool = True, steps: int | None = None) -> Path:
    """The directory of a built-in target, made when absent: a small model of the preset's architecture, trained on the
    standard library's sources for a minute of two cores and saved as a Hugging Face checkpoint.

    steps: of training, None for the preset's. ValueError: an unknown preset, a directory that holds anything else.
    """
    if preset not in TINY_MODELS:
        raise ValueError(f"no built-in target {preset!r}; there are {', '.join(TINY_MODELS)}")
    directory, recipe = Path(directory), {"preset": preset, "seed": seed, "steps": steps or TINY_STEPS[preset]}
    if directory.exists():
        return check_recipe(directory, recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TINY_MODELS[preset]()
    tokenizer = byte_tokenizer()
    reached = train_tiny(model, tokenizer, recipe, progress)
    directory.parent.mkdir(parents=True, exist_ok=True)

    def write(half: Path) -> None:
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        (half / "tiny_target.json").write_text(to_json(recipe | reached) + "\n")

    try:
        replace_with(directory, write)
    except OSError:
        if not directory.exists():
            raise
        check_recipe(directory, recipe)  # another process was faster
    return directory


def check_recipe(directory: Path, recipe: dict) -> Path:
    try:
        found = json.loads((directory / "tiny_target.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{directory} exists and holds no built-in target; name another one, or remove it") from None
    if found | recipe != found:
        have = {key: found.get(key) for key in recipe}
        raise ValueError(f"{directory} holds built-in target {have}, wanted is {recipe}; name another, or remove it")
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 are the bytes, then SPECIAL_TOKENS; no merges, so any text survives the round trip."""
    stand_in = bytes_to_unicode()  # byte-level tokenizers name each byte by a printable character
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    pad, bos, eos, *turns = SPECIAL_TOKENS
    named = {"pad_token": pad, "bos_token": bos, "eos_token": eos, "additional_special_tokens": turns}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False, **named
    )


def tiny_deepseek_v3() -> nn.Module:
    """transformers' own DeepSeek-V3, small: MLA, yarn, and a mixture of experts in the last layer."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    # Not in transformers' config, but vLLM asks for them.
    engines = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0}
    config = transformers.DeepseekV3Config(
        **SIZES | experts | engines,
        first_k_dense_replace=SIZES["num_hidden_layers"] - 1,
        rope_parameters=rope,
        max_position_embeddings=163840,
    )
    return with_stops(transformers.DeepseekV3ForCausalLM(config))


def tiny_kimi_k3() -> nn.Module:
    situ = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    mla = {"mla_use_nope": True, "mla_use_output_gate": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576}
    return with_stops(TinyKimiK3ForCausalLM(TinyKimiK3Config(**SIZES | situ | mla)))


TINY_MODELS = {"deepseek-v3": tiny_deepseek_v3, "kimi-k3": tiny_kimi_k3}


def with_stops(model: nn.Module) -> nn.Module:
    model.generation_config.eos_token_id = [EOS, END]  # an answer ends with its turn
    return model


# ------------------------------------------------------------------------------------------------------- their training

BATCH_TOKENS, WARMUP, MUON_LR, ADAM_LR = 2048, 10, 0.02, 0.003


def train_tiny(model: nn.Module, tokenizer, recipe: dict, progress: bool) -> dict:
    """Next-token training in place, on whole documents; returns what it reaches on the answers of held-out files."""
    batches = length_batches(python_documents(held_out=False, seed=recipe["seed"]), random.Random(recipe["seed"]))
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        outer = any(part in name for part in ("embed_tokens", "lm_head", "gate.weight"))  # the latter routes to experts
        (others if outer or parameter.ndim < 2 else matrices).append(parameter)
    optimizers = [Muon(matrices, lr=MUON_LR), torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0)]
    steps = recipe["steps"]
    lrs = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / WARMUP, 1 - i / steps)) for o in optimizers]
    bar = tqdm(range(steps), desc=f"training the tiny {recipe['preset']} target", unit="step", disable=not progress)
    for _ in bar:
        loss, _, _ = next_token_loss(model, answered(tokenizer, next(batches)))
        loss.backward()
        for each in optimizers + lrs:
            each.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    nats = hits = count = 0
    held_out = answered(tokenizer, python_documents(held_out=True)[:64])
    with torch.no_grad():
        for i in range(0, len(held_out), 8):
            loss, hit, n = next_token_loss(model.eval(), held_out[i : i + 8], answers_only=True)
            nats, hits, count = nats + loss.item() * n, hits + hit, count + n
    reached = {"bits_per_byte": nats / count / math.log(2), "top1": hits / count}
    if progress:
        bits, top1 = reached.values()
        print(f"tiny {recipe['preset']} target, held-out answers: {bits:.2f} bits per byte, {top1:.1%} of bytes right")
    return reached


def length_batches(pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Endless shuffled batches of (prompt, answer) pairs of similar length, of about BATCH_TOKENS bytes."""
    while True:
        batches, batch = [], []
        for pair in sorted(pairs, key=lambda pair: len("".join(pair)) + rng.randrange(32)):
            if (len(batch) + 1) * len("".join(pair)) > BATCH_TOKENS:
                batches.append(batch)
                batch = []
            batch.append(pair)
        rng.shuffle(batches)
        yield from batches


def next_token_loss(model: nn.Module, batch: list[Document], answers_only=False) -> tuple[Tensor, int, int]:
    """Mean cross-entropy in nats, top-1 hits, tokens counted. Padding is on the right, where no causal model looks."""
    tokens = pad_sequence([d.tokens for d in batch], batch_first=True, padding_value=PAD)
    counted = [d.loss_mask if answers_only else torch.ones_like(d.loss_mask) for d in batch]
    counted = pad_sequence(counted, batch_first=True)[:, 1:]
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    logits, labels = model.lm_head(hidden[counted]), tokens[:, 1:][counted]
    return F.cross_entropy(logits, labels), int((logits.argmax(-1) == labels).sum()), len(labels)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz before it is applied; for parameters [..,m,n] (.. are experts)."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = {}  # matrices of one shape are orthogonalised together
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                nesterov = p.grad.lerp(buffer, group["momentum"])
                alike.setdefault(p.shape[-2:], []).append((p, nesterov.view(-1, *p.shape[-2:])))
            for (m, n), pairs in alike.items():
                updates = orthogonalise(torch.cat([u for _, u in pairs])) * max(1, m / n) ** 0.5
                for (p, _), update in zip(pairs, updates.split([len(u) for _, u in pairs]), strict=True):
                    p.sub_(update.view_as(p), alpha=group["lr"])


def orthogonalise(x: Tensor, rounds: int = 5) -> Tensor:
    """x [b,m,n] -> roughly U V^T of its singular value decomposition, by a quintic iteration on the singular values."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0: five rounds bring all of them near 1
    if x.shape[-2] > x.shape[-1]:
        return orthogonalise(x.mT, rounds).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
